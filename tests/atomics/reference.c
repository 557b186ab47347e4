/*
 * What a C compiler makes of the atomics' formulas, with its own types: the reference that the
 * suite `atomics` compares with. The formulas are those of fi_atomic(3).
 *
 * Standard input holds records: five words of 32 bits (form: 0 base, 1 fetch, 2 compare;
 * operation, type, count, 0), then count elements each of target, operand and, in the compare
 * form, compare. For each record, standard output gets the target afterwards and, but in the base
 * form, the result. Words and elements are in the host's byte order.
 */
#include <complex.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef float _Complex c32;
typedef double _Complex c64;
typedef long double ld;
typedef long double _Complex cld;
__extension__ typedef __int128 i128;
__extension__ typedef unsigned __int128 u128;

enum { MIN, MAX, SUM, PROD, LOR, LAND, BOR, BAND, LXOR, BXOR, READ, WRITE,
       CSWAP, CSWAP_NE, CSWAP_LE, CSWAP_LT, CSWAP_GE, CSWAP_GT, MSWAP, DIFF };

static void give_up(const char *why)
{
	fprintf(stderr, "reference: %s\n", why);
	exit(2);
}

/* t target, o operand, c compare, r result; a, b and k are their elements. */
#define EACH(T, STATEMENT) \
	for (size_t i = 0; i < n; i++) { \
		T a = t[i], b = o[i], k = c[i]; \
		(void)b; (void)k; \
		r[i] = a; \
		STATEMENT; \
	} \
	return
#define SET(T, VALUE) EACH(T, t[i] = (T)(VALUE))
#define SWAP_IF(T, CONDITION) EACH(T, if (CONDITION) t[i] = b)

#define ANY(T) \
	case SUM: SET(T, a + b); \
	case DIFF: SET(T, a - b); \
	case PROD: SET(T, a * b); \
	case LOR: SET(T, a || b); \
	case LAND: SET(T, a && b); \
	case LXOR: SET(T, (a && !b) || (!a && b)); \
	case READ: EACH(T, (void)0); \
	case WRITE: SET(T, b); \
	case CSWAP: SWAP_IF(T, k == a); \
	case CSWAP_NE: SWAP_IF(T, k != a)
#define ORDERED(T) \
	case MIN: EACH(T, if (b < a) t[i] = b); \
	case MAX: EACH(T, if (b > a) t[i] = b); \
	case CSWAP_LE: SWAP_IF(T, k <= a); \
	case CSWAP_LT: SWAP_IF(T, k < a); \
	case CSWAP_GE: SWAP_IF(T, k >= a); \
	case CSWAP_GT: SWAP_IF(T, k > a)
#define BITS(T) \
	case BOR: SET(T, a | b); \
	case BAND: SET(T, a & b); \
	case BXOR: SET(T, a ^ b); \
	case MSWAP: SET(T, (b & k) | (a & ~k))

#define FUNCTION(NAME, T, CASES) \
	static void NAME(int op, size_t n, void *target, void *operand, void *compare, void *result) \
	{ \
		T *t = target, *o = operand, *c = compare, *r = result; \
		switch (op) { \
			CASES; \
		} \
		give_up("operation without a meaning on the type"); \
	}
#define INTEGER(T) FUNCTION(do_##T, T, ANY(T); ORDERED(T); BITS(T))
#define REAL(T) FUNCTION(do_##T, T, ANY(T); ORDERED(T))
#define COMPLEX(T) FUNCTION(do_##T, T, ANY(T))

INTEGER(int8_t)
INTEGER(uint8_t)
INTEGER(int16_t)
INTEGER(uint16_t)
INTEGER(int32_t)
INTEGER(uint32_t)
INTEGER(int64_t)
INTEGER(uint64_t)
REAL(float)
REAL(double)
COMPLEX(c32)
COMPLEX(c64)
REAL(ld)
COMPLEX(cld)
INTEGER(i128)
INTEGER(u128)

/* The floats of 16 and 8 bits, by arithmetic of double. */
struct small {
	int size, mantissa, bias;
	/* Magnitudes of what is too large, and of a NaN. */
	unsigned overflow, nan;
};

static unsigned load(const struct small *f, const void *at, size_t i)
{
	return f->size == 2 ? ((const uint16_t *)at)[i] : ((const uint8_t *)at)[i];
}

static void store(const struct small *f, void *at, size_t i, unsigned bits)
{
	if (f->size == 2)
		((uint16_t *)at)[i] = (uint16_t)bits;
	else
		((uint8_t *)at)[i] = (uint8_t)bits;
}

static double value_of(const struct small *f, unsigned bits)
{
	unsigned sign = 1u << (8 * f->size - 1), magnitude = bits & (sign - 1);
	int exponent = (int)(magnitude >> f->mantissa);
	unsigned fraction = magnitude & ((1u << f->mantissa) - 1);
	double value;

	if (magnitude > f->overflow || magnitude == f->nan)
		value = NAN;
	else if (magnitude == f->overflow)
		value = INFINITY;
	else if (exponent == 0)
		value = ldexp(fraction, 1 - f->bias - f->mantissa);
	else
		value = ldexp(fraction + (1u << f->mantissa), exponent - f->bias - f->mantissa);
	return bits & sign ? -value : value;
}

/* The bits of the nearest number, and of the even one of two. */
static unsigned bits_of(const struct small *f, double value)
{
	unsigned sign = signbit(value) ? 1u << (8 * f->size - 1) : 0, bits;
	int exponent;

	if (isnan(value))
		return sign | f->nan;
	if (isinf(value))
		return sign | f->overflow;
	if (value == 0)
		return sign;
	frexp(value, &exponent);
	exponent = exponent - 1 < 1 - f->bias ? 1 - f->bias : exponent - 1;
	/* In units of the last place, which the default rounding makes whole. */
	bits = (unsigned)nearbyint(ldexp(fabs(value), f->mantissa - exponent));
	bits += (unsigned)(exponent + f->bias - 1) << f->mantissa;
	return sign | (bits < f->overflow ? bits : f->overflow);
}

static void do_small(const struct small *f, int op, size_t n, void *t, void *o, void *c, void *r)
{
	for (size_t i = 0; i < n; i++) {
		unsigned old = load(f, t, i), new = load(f, o, i);
		double a = value_of(f, old), b = value_of(f, new), k = value_of(f, load(f, c, i));
		unsigned is;

		switch (op) {
		case SUM: is = bits_of(f, a + b); break;
		case DIFF: is = bits_of(f, a - b); break;
		case PROD: is = bits_of(f, a * b); break;
		case LOR: is = bits_of(f, a || b); break;
		case LAND: is = bits_of(f, a && b); break;
		case LXOR: is = bits_of(f, (a && !b) || (!a && b)); break;
		case READ: is = old; break;
		case WRITE: is = new; break;
		case CSWAP: is = k == a ? new : old; break;
		case CSWAP_NE: is = k != a ? new : old; break;
		case MIN: is = b < a ? new : old; break;
		case MAX: is = b > a ? new : old; break;
		case CSWAP_LE: is = k <= a ? new : old; break;
		case CSWAP_LT: is = k < a ? new : old; break;
		case CSWAP_GE: is = k >= a ? new : old; break;
		case CSWAP_GT: is = k > a ? new : old; break;
		default: give_up("operation without a meaning on the type"); return;
		}
		store(f, r, i, old);
		store(f, t, i, is);
	}
}

#define SMALL(NAME, ...) \
	static void do_##NAME(int op, size_t n, void *t, void *o, void *c, void *r) \
	{ \
		static const struct small f = { __VA_ARGS__ }; \
		do_small(&f, op, n, t, o, c, r); \
	}
SMALL(f16, 2, 10, 15, 0x7c00, 0x7e00)
SMALL(bf16, 2, 7, 127, 0x7f80, 0x7fc0)
SMALL(e4m3, 1, 3, 7, 0x7f, 0x7f)
SMALL(e5m2, 1, 2, 15, 0x7c, 0x7e)

static const struct {
	size_t size;
	void (*run)(int op, size_t n, void *target, void *operand, void *compare, void *result);
} types[] = {
	{ sizeof(int8_t), do_int8_t }, { sizeof(uint8_t), do_uint8_t },
	{ sizeof(int16_t), do_int16_t }, { sizeof(uint16_t), do_uint16_t },
	{ sizeof(int32_t), do_int32_t }, { sizeof(uint32_t), do_uint32_t },
	{ sizeof(int64_t), do_int64_t }, { sizeof(uint64_t), do_uint64_t },
	{ sizeof(float), do_float }, { sizeof(double), do_double },
	{ sizeof(c32), do_c32 }, { sizeof(c64), do_c64 },
	{ sizeof(ld), do_ld }, { sizeof(cld), do_cld },
	{ sizeof(i128), do_i128 }, { sizeof(u128), do_u128 },
	{ 2, do_f16 }, { 2, do_bf16 }, { 1, do_e4m3 }, { 1, do_e5m2 },
};

enum { LEN_MAX = 65536 };
_Alignas(32) static unsigned char target[LEN_MAX], operand[LEN_MAX], compare[LEN_MAX];
_Alignas(32) static unsigned char result[LEN_MAX];

static void take(void *to, size_t len)
{
	if (fread(to, 1, len, stdin) != len)
		give_up("a record is cut off");
}

static void give(const void *from, size_t len)
{
	if (fwrite(from, 1, len, stdout) != len)
		give_up("cannot write");
}

int main(void)
{
	uint32_t head[5];

	while (fread(head, sizeof(head), 1, stdin) == 1) {
		uint32_t kind = head[0], op = head[1], type = head[2], count = head[3];

		if (kind > 2 || type >= sizeof(types) / sizeof(types[0]))
			give_up("a form or a type that does not exist");
		if (count > LEN_MAX / types[type].size)
			give_up("too many elements");
		size_t len = count * types[type].size;
		take(target, len);
		take(operand, len);
		if (kind == 2)
			take(compare, len);
		types[type].run((int)op, count, target, operand, compare, result);
		give(target, len);
		if (kind != 0)
			give(result, len);
	}
	if (fflush(stdout) != 0)
		give_up("cannot write");
	return 0;
}
