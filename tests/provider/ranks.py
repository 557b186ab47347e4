"""Every kind of MPI call, 1 B to 64 MiB, with every byte looked at. Each rank runs it.

    ranks.py all SIZE      messages up to SIZE bytes, collectives, windows
    ranks.py two-sided SIZE    the same without windows
    ranks.py threads       four threads a rank, MPI_THREAD_MULTIPLE
    ranks.py endless       messages and collectives until somebody kills a rank

At the end rank 0 says how many ranks each host has, and "all N ranks agree".
"""

import os
import sys
import threading

from mpi4py import rc

rc.thread_level = "multiple" if sys.argv[1] == "threads" else "single"

from mpi4py import MPI  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % RANKS, (RANK - 1) % RANKS


def pattern(seed, size):
    """Bytes that differ from rank to rank and from place to place."""
    line = bytes((seed * 7 + i * 13) % 251 for i in range(251))
    return (line * (size // 251 + 1))[:size]


def check(what, name):
    if not what:
        print(f"rank {RANK}: {name} is wrong", flush=True)
        WORLD.Abort(1)


def ring(limit):
    size = 1
    while size <= limit:
        got = bytearray(size)
        WORLD.Sendrecv(pattern(RANK, size), RIGHT, 5, got, LEFT, 5)
        check(got == pattern(LEFT, size), f"a message of {size} bytes")
        size *= 8


def collectives(count):
    ints = range(count)
    array = lambda f: bytearray(b"".join((f(i) & 0x7FFFFFFF).to_bytes(4, "little") for i in ints))
    of = lambda buf: [buf, MPI.INT32_T]
    buf = array(lambda i: i) if RANK == 0 else array(lambda i: 0)
    WORLD.Bcast(of(buf), 0)
    check(buf == array(lambda i: i), "bcast")
    mine, out = array(lambda i: RANK + i), array(lambda i: 0)
    total = RANKS * (RANKS - 1) // 2
    WORLD.Allreduce(of(mine), of(out), MPI.SUM)
    check(out == array(lambda i: total + RANKS * i), "allreduce")
    WORLD.Reduce(of(mine), of(out), MPI.MAX, RANKS - 1)
    check(RANK != RANKS - 1 or out == array(lambda i: RANKS - 1 + i), "reduce")
    WORLD.Scan(of(mine), of(out))
    below = RANK * (RANK + 1) // 2
    check(out == array(lambda i: below + (RANK + 1) * i), "scan")
    WORLD.Exscan(of(mine), of(out))
    check(RANK == 0 or out == array(lambda i: below - RANK + RANK * i), "exscan")
    every = b"".join(array(lambda i, r=r: r + i) for r in range(RANKS))
    whole = bytearray(len(every))
    WORLD.Allgather(of(mine), of(whole))
    check(whole == every, "allgather")
    whole = bytearray(len(every))
    WORLD.Gather(of(mine), of(whole), 0)
    check(RANK != 0 or whole == every, "gather")
    WORLD.Scatter(of(bytearray(every)), of(out), 0)
    check(out == mine, "scatter")
    rows = bytearray(b"".join(array(lambda i, r=r: RANK * 1000 + r + i) for r in range(RANKS)))
    WORLD.Alltoall(of(rows), of(whole))
    want = b"".join(array(lambda i, r=r: r * 1000 + RANK + i) for r in range(RANKS))
    check(whole == want, "alltoall")
    counts = [count] * RANKS
    WORLD.Reduce_scatter(of(bytearray(every)), of(out), counts, MPI.SUM)
    check(out == array(lambda i: RANKS * (RANK + i)), "reduce_scatter")
    parts = [r + 1 for r in range(RANKS)]
    some = bytearray(sum(parts))
    WORLD.Allgatherv(bytes([RANK]) * parts[RANK], [some, parts])
    check(some == b"".join(bytes([r]) * parts[r] for r in range(RANKS)), "allgatherv")
    own = array(lambda i: 0)
    WORLD.Reduce_scatter_block(of(bytearray(every)), of(own), MPI.SUM)
    check(own == out, "reduce_scatter_block")
    unequal(parts)
    started(of, mine, array)
    WORLD.Barrier()


def unequal(parts):
    """Collectives with another length for each rank."""
    whole = bytearray(sum(parts))
    want = b"".join(bytes([r]) * parts[r] for r in range(RANKS))
    WORLD.Gatherv(bytes([RANK]) * parts[RANK], [whole, parts], RANKS - 1)
    check(RANK != RANKS - 1 or whole == want, "gatherv")
    got = bytearray(parts[RANK])
    WORLD.Scatterv([want, parts], got, 0)
    check(got == bytes([RANK]) * parts[RANK], "scatterv")
    # To each as many bytes as its place says, so from each as many as ours.
    out = b"".join(bytes([RANK * 16 + r]) * parts[r] for r in range(RANKS))
    got = bytearray(parts[RANK] * RANKS)
    want = b"".join(bytes([r * 16 + RANK]) * parts[RANK] for r in range(RANKS))
    WORLD.Alltoallv([out, parts], [got, [parts[RANK]] * RANKS])
    check(got == want, "alltoallv")
    places = lambda lengths: [sum(lengths[:r]) for r in range(RANKS)]
    theirs, kinds = [parts[RANK]] * RANKS, [MPI.BYTE] * RANKS
    got = bytearray(len(got))
    WORLD.Alltoallw([out, (parts, places(parts)), kinds], [got, (theirs, places(theirs)), kinds])
    check(got == want, "alltoallw")


def started(of, mine, array):
    """Collectives that are begun together and waited for later, and those of neighbours."""
    total = RANKS * (RANKS - 1) // 2
    first, every = array(lambda i: i + 1), bytearray(len(mine) * RANKS)
    buf, summed = (first[:] if RANK == 0 else bytearray(len(first))), bytearray(len(mine))
    MPI.Request.Waitall(
        [
            WORLD.Ibcast(of(buf), 0),
            WORLD.Iallreduce(of(mine), of(summed), MPI.SUM),
            WORLD.Iallgather(of(mine), of(every)),
            WORLD.Ibarrier(),
        ]
    )
    check(buf == first, "ibcast")
    check(summed == array(lambda i: total + RANKS * i), "iallreduce")
    check(every == b"".join(array(lambda i, r=r: r + i) for r in range(RANKS)), "iallgather")
    circle = WORLD.Create_cart([RANKS], [True])
    sides = bytearray(2 * len(mine))
    circle.Neighbor_allgather(of(mine), of(sides))
    want = array(lambda i: LEFT + i) + array(lambda i: RIGHT + i)
    check(sides == want, "neighbor_allgather")
    circle.Free()


def derived_types():
    kind = MPI.DOUBLE.Create_vector(100, 3, 7).Commit()
    out, got = bytearray(700 * 8), bytearray(700 * 8)
    out[:] = pattern(RANK, len(out))
    WORLD.Sendrecv([out, 1, kind], RIGHT, 1, [got, 1, kind], LEFT, 1)
    theirs = pattern(LEFT, len(out))
    for i in range(697):
        word = slice(8 * i, 8 * i + 8)
        check(got[word] == (theirs[word] if i % 7 < 3 else bytes(8)), f"element {i} of a vector")
    kind.Free()


def matching():
    for k in range(50):
        sent = WORLD.isend(k * RANK, (k + RANK) % RANKS, k)
        status = MPI.Status()
        WORLD.Probe(MPI.ANY_SOURCE, k, status)
        message = WORLD.mprobe(status.source, k)
        check(message.recv() == k * status.source, "a probed message")
        sent.wait()
    never = WORLD.Irecv(bytearray(4), MPI.ANY_SOURCE, 777)
    never.Cancel()
    status = MPI.Status()
    never.Wait(status)
    check(status.Is_cancelled(), "a cancelled receive")
    # What nobody has asked for yet is kept, in order.
    sent = []
    if RANK == 0:
        lines = [bytes([k % 256]) * 300 for k in range(1000)]
        sent = [WORLD.Isend(line, RANKS - 1, 3) for line in lines]
    WORLD.Barrier()
    if RANK == RANKS - 1:
        for k in range(1000):
            got = bytearray(300)
            WORLD.Recv(got, 0, 3)
            check(got == bytes([k % 256]) * 300, "an unexpected message")
    MPI.Request.Waitall(sent)


def wildcards():
    """Receives from anybody with any tag take what each rank sent in its order."""
    count = 100
    others = [r for r in range(RANKS) if r != RANK]
    got = [bytearray(8) for _ in range(count * len(others))]
    statuses = [MPI.Status() for _ in got]
    # Some wait for their message, and some messages for their receive.
    half = len(got) // 2
    receives = [WORLD.Irecv(buf, MPI.ANY_SOURCE, MPI.ANY_TAG) for buf in got[:half]]
    WORLD.Barrier()
    number = lambda k: k.to_bytes(8, "little")
    sent = [WORLD.Isend(number(k), r, k) for k in range(count) for r in others]
    receives += [WORLD.Irecv(buf, MPI.ANY_SOURCE, MPI.ANY_TAG) for buf in got[half:]]
    MPI.Request.Waitall(receives, statuses)
    MPI.Request.Waitall(sent)
    seen = dict.fromkeys(others, 0)
    for buf, status in zip(got, statuses):
        k = seen[status.source]
        check(buf == number(k) and status.tag == k, f"message {k} of rank {status.source}")
        seen[status.source] += 1
    check(set(seen.values()) == {count}, "the number of messages")


def one_sided(limit):
    word = lambda value: bytearray(value.to_bytes(8, "little"))
    longs = lambda buf: [buf, MPI.INT64_T]
    win = MPI.Win.Allocate(8192, 8, comm=WORLD)
    memory = memoryview(win.tomemory()).cast("B")
    for i in range(1024):
        memory[8 * i : 8 * i + 8] = word(RANK * 10000 + i)
    WORLD.Barrier()
    win.Lock_all()
    # What is lent to an operation has a name, so that it lives until the operation is done.
    got, old, one, five, swap = bytearray(128), word(0), word(1), word(RANK + 5), word(77)
    win.Get(longs(got), RIGHT, 100)
    win.Flush(RIGHT)
    want = b"".join(word(RIGHT * 10000 + 100 + i) for i in range(16))
    check(got == want, "get")
    for _ in range(50):
        win.Fetch_and_op(longs(one), longs(old), 0, 0, MPI.SUM)
        win.Flush(0)
    win.Unlock_all()
    win.Fence()
    check(RANK != 0 or memory[:8] == word(50 * RANKS), "fetch_and_op")
    win.Put(longs(five), RIGHT, 500)
    win.Fence()
    check(memory[4000:4008] == word(LEFT + 5), "put")
    WORLD.Barrier()
    win.Lock(RIGHT)
    win.Compare_and_swap(longs(swap), longs(five), longs(old), RIGHT, 500)
    win.Unlock(RIGHT)
    check(old == word(RANK + 5), "compare_and_swap")
    win.Fence()
    check(memory[4000:4008] == word(77), "what compare_and_swap wrote")
    add = bytearray(b"".join(word(i) for i in range(8)))
    win.Accumulate(longs(add), 0, 600, MPI.SUM)
    win.Fence()
    want = b"".join(word(600 + i + RANKS * i) for i in range(8))
    check(RANK != 0 or memory[4800:4864] == want, "accumulate")
    win.Fence()
    was = bytearray(64)
    win.Get_accumulate(longs(add), longs(was), RIGHT, 700, MPI.SUM)
    win.Fence()
    want = b"".join(word(RIGHT * 10000 + 700 + i) for i in range(8))
    check(was == want, "get_accumulate")
    win.Free()
    size = 1
    while size <= limit:
        win = MPI.Win.Allocate(size, 1, comm=WORLD)
        win.Fence()
        out = pattern(RANK, size)
        win.Put(out, RIGHT)
        win.Fence()
        check(bytes(win.tomemory()) == pattern(LEFT, size), f"a put of {size} bytes")
        got = bytearray(size)
        win.Get(got, RIGHT)
        win.Fence()
        check(got == pattern(RANK, size), f"a get of {size} bytes")
        win.Free()
        size *= 64


def threads():
    check(MPI.Query_thread() == MPI.THREAD_MULTIPLE, "the thread level")

    def talk(tag):
        for k in range(50):
            got = bytearray(1000)
            WORLD.Sendrecv(pattern(RANK + tag + k, 1000), RIGHT, tag, got, LEFT, tag)
            check(got == pattern(LEFT + tag + k, 1000), f"message {k} of thread {tag}")

    all_of_them = [threading.Thread(target=talk, args=(tag,)) for tag in range(10, 14)]
    for thread in all_of_them:
        thread.start()
    for thread in all_of_them:
        thread.join()


def everything(limit, windows):
    stages = [
        ("ring", lambda: ring(limit)),
        ("collectives", lambda: [collectives(count) for count in (1, 100, 5000)]),
        ("derived types", derived_types),
        ("matching", matching),
        ("wildcards", wildcards),
    ]
    if windows:
        stages.append(("one-sided", lambda: one_sided(min(limit, 1 << 24))))
    for what, run in stages:
        if RANK == 0:
            print(what, flush=True)
        run()


def agree():
    hosts = WORLD.gather(os.uname().nodename)
    if RANK == 0:
        each = sorted(hosts.count(host) for host in set(hosts))
        print("ranks on each host:", *each)
        print(f"all {RANKS} ranks agree:", MPI.Get_library_version().split("\n")[0])


def endless():
    # In one piece, since the launcher mixes what ranks write.
    os.write(1, f"pid {os.getpid()}\n".encode())
    size = 1
    while True:
        got = bytearray(size)
        WORLD.Sendrecv(bytes(size), RIGHT, 5, got, LEFT, 5)
        WORLD.allreduce(size)
        size = size * 3 if size < 1 << 20 else 1


if sys.argv[1] == "endless":
    endless()
elif sys.argv[1] == "threads":
    threads()
else:
    everything(int(sys.argv[2]), sys.argv[1] == "all")
agree()
