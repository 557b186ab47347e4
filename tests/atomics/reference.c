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
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef float _Complex c32;
typedef double _Complex c64;
typedef long double ld;
typedef long double _Complex cld;

enum { MIN, MAX, SUM, PROD, LOR, LAND, BOR, BAND, LXOR, BXOR, READ, WRITE,
       CSWAP, CSWAP_NE, CSWAP_LE, CSWAP_LT, CSWAP_GE, CSWAP_GT, MSWAP };

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
