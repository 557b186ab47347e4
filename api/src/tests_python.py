# Seals frames as docs/wire.md says, "Sealed frames". A line each: mode, whether AES, frames to a key
# as a power of two, the first secret, the frame's counter, and the frame. Prints the sealed frame.
import hashlib
import hmac
import sys

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305


def expand(secret, name):
    """HKDF-Expand of RFC 5869, one block."""
    return hmac.new(secret, name + b"\x01", hashlib.sha256).digest()


for line in sys.stdin:
    mode, aes, bits, secret, counter, clear = line.split()
    counter, secret, frame = int(counter), bytes.fromhex(secret), bytearray.fromhex(clear)
    for _ in range(counter >> int(bits)):
        secret = expand(secret, b"next")
    cipher = (AESGCM if aes == "true" else ChaCha20Poly1305)(expand(secret, b"key"))
    nonce = bytes(4) + counter.to_bytes(8, "big")
    frame[36:40] = (counter & 0xFFFFFFFF).to_bytes(4, "little")
    base, frame = bytes(frame[:40]), bytes(frame)
    if mode == "Encrypted":
        print((base + cipher.encrypt(nonce, frame[40:], base)).hex())
    else:
        print((frame + cipher.encrypt(nonce, b"", frame)).hex())
