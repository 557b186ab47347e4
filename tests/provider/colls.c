/*
 * Every collective of MPI that what is in mpi/ makes, the component of Open MPI or the library for
 * any MPI, by a call that blocks and by one with a request: all forms, types and operations,
 * communicators that come and go, and a long message under way across each. What comes out is
 * compared with what every rank computes by itself; their own count of calls tells whether they
 * made them. With MPICH's standard ABI the library leaves requests to the MPI.
 *
 * Blocks of up to 1 MiB have to be theirs (coll_barewire_max_bytes, BAREWIRE_MPI_MAX_BYTES).
 *
 * Arguments: "all" (with "none": without them), "threads", "die" (with "request": while a request
 * is waited for), "halves" (floats of 16 bits alone, at lengths where other types are the MPI's), or
 * "bench".
 */
#define _GNU_SOURCE
#include "made.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LONG_MESSAGE (1 << 20)
#define MAX_COUNT (1 << 17)

static int rank, size, wrong;
static MPI_Comm comm;
static unsigned char *in, *out, *want, *one;

/* ---- A long message under way ---- */

enum across { NOTHING, UNDER_WAY, LATE, WAYS };
static const char *const ACROSS[] = { "", "with a message under way", "while the others receive" };
/* Calls are made with a request. */
static int asking;
static MPI_Request asked;
static enum across across;
/* The type and operation, or the layout, that is being tried. */
static char trying[64];
static char *sent, *received;
static MPI_Request requests[64];
static int request_count;

static void check(int good, const char *what, const char *more)
{
	if (good)
		return;
	wrong++;
	if (wrong < 20)
		printf("BAD rank %d of %d: %s: %s %s %s %s\n", rank, size, what, more, trying,
		       ACROSS[across], asking ? "(with a request)" : "");
}

/*
 * UNDER_WAY: everybody sends to the next. LATE: rank 0 sends to all others, who receive before they
 * call; it has to move the message on while it waits for them in its call.
 */
static void begin(void)
{
	request_count = 0;
	if (across == UNDER_WAY) {
		memset(received, 0, LONG_MESSAGE);
		MPI_Irecv(received, LONG_MESSAGE, MPI_BYTE, (rank + size - 1) % size, 7, comm,
			  &requests[request_count++]);
		MPI_Isend(sent, LONG_MESSAGE, MPI_BYTE, (rank + 1) % size, 7, comm,
			  &requests[request_count++]);
	} else if (across == LATE && rank == 0) {
		for (int r = 1; r < size; r++)
			MPI_Isend(sent, LONG_MESSAGE, MPI_BYTE, r, 7, comm,
				  &requests[request_count++]);
	} else if (across == LATE) {
		memset(received, 0, LONG_MESSAGE);
		MPI_Recv(received, LONG_MESSAGE, MPI_BYTE, 0, 7, comm, MPI_STATUS_IGNORE);
	}
}

static void end(const char *what)
{
	MPI_Waitall(request_count, requests, MPI_STATUSES_IGNORE);
	if (across == UNDER_WAY || (across == LATE && rank != 0))
		check(!memcmp(sent, received, LONG_MESSAGE), what, "spoiled the message");
}

/* Others of Open MPI's may make some of their calls by calls of the component. */
#define EITHER 2

/* Makes a call, which barewire has to make, or to leave to others. */
#define CALL(what, ours, call) do { \
	begin(); \
	unsigned long before_ = made(); \
	check((call) == MPI_SUCCESS, what, "failed"); \
	int is_ours_ = LEFT_REQUESTS && asking ? 0 : (ours); \
	check(without || is_ours_ == EITHER || made() - before_ == (unsigned long) is_ours_, what, \
	      is_ours_ ? "was not made by barewire" : "was made by barewire"); \
	end(what); \
} while (0)

static int ended(int err) { return err ? err : MPI_Wait(&asked, MPI_STATUS_IGNORE); }

/* A call in the way that is tried. */
#define AS(name, ...) \
	(asking ? ended(MPI_I##name(__VA_ARGS__, &asked)) : BLOCKING_##name(__VA_ARGS__))
#define BLOCKING_barrier MPI_Barrier
#define BLOCKING_bcast MPI_Bcast
#define BLOCKING_allreduce MPI_Allreduce
#define BLOCKING_reduce MPI_Reduce
#define BLOCKING_reduce_scatter_block MPI_Reduce_scatter_block
#define BLOCKING_allgather MPI_Allgather
#define BLOCKING_alltoall MPI_Alltoall
#define BLOCKING_gather MPI_Gather
#define BLOCKING_scatter MPI_Scatter

/* ---- Reductions ---- */

struct type {
	const char *name;
	MPI_Datatype mpi;
	/*
	 * i: integer, b: bool, f, d, l: float, double, long double; F, D, L: complex; p: 2 ints;
	 * h: float of 16 bits, u: upper half of a float.
	 */
	char form;
};

/* A number that 8 bits of significand hold, as a float of 16 bits. */
static void short_float(unsigned char *at, char form, unsigned value)
{
	int exponent = 31 - __builtin_clz(value);
	unsigned half = (exponent + 15u) << 10 | (value << (10 - exponent) & 0x3ff);
	float single = value;

	memcpy(at, form == 'h' ? (char *) &half : (char *) &single + 2, 2);
}

static void put(unsigned char *at, const struct type *t, size_t len, int r, int i)
{
	int value = (r * 7 + i * 3) % 5;
	long double parts[2] = { value + 1, (r + i) % 3 };
	memset(at, 0, len);
	for (int k = 0; k < 2; k++) {
		switch (t->form) {
		case 'f': case 'F': ((float *) at)[k] = parts[k]; break;
		case 'd': case 'D': ((double *) at)[k] = parts[k]; break;
		case 'l': case 'L': ((long double *) at)[k] = parts[k]; break;
		case 'b': at[0] = value % 2; break;
		case 'p': ((int *) at)[k] = k ? r : value; break;
		case 'h': case 'u': short_float(at, t->form, value + 1); break;
		default: at[0] = value;
		}
		if (t->form >= 'a' && t->form != 'p')
			break;
	}
}

static void fill(unsigned char *to, const struct type *t, int r, int count)
{
	int len;
	MPI_Type_size(t->mpi, &len);
	for (int i = 0; i < count; i++)
		put(to + (size_t) i * len, t, len, r, i);
}

/* Of floats of 16 bits, which MPI_Reduce_local may not know: sums, least and greatest. */
static void fold_short(const struct type *t, MPI_Op op, int count)
{
	for (int i = 0; i < count; i++) {
		unsigned all = 0;

		for (int r = 0; r < size; r++) {
			unsigned value = (r * 7 + i * 3) % 5 + 1;
			all = op == MPI_SUM ? all + value
			    : r == 0 || (op == MPI_MIN) == (value < all) ? value : all;
		}
		short_float(want + 2 * i, t->form, all);
	}
}

/* The reduction of all ranks' blocks in the order of ranks, by this rank alone. */
static void fold(const struct type *t, MPI_Op op, int count)
{
	if (t->form == 'h' || t->form == 'u') {
		fold_short(t, op, count);
		return;
	}
	fill(want, t, size - 1, count);
	for (int r = size - 2; r >= 0; r--) {
		fill(one, t, r, count);
		MPI_Reduce_local(one, want, count, t->mpi, op);
	}
}

/* As `same`; the padding of long doubles counts for nothing. */
static void equal(const struct type *t, const unsigned char *a, const unsigned char *b, size_t len,
		  const char *what)
{
	for (size_t at = 0; (t->form == 'l' || t->form == 'L') && at < len; at += 16) {
		check(*(long double *) (a + at) == *(long double *) (b + at), what, "wrong");
		if (at + 16 >= len)
			return;
	}
	check(!memcmp(a, b, len), what, "wrong");
}

static const char *op_name(MPI_Op op)
{
	static const MPI_Op ops[] = { MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX, MPI_LAND, MPI_LOR,
				      MPI_LXOR, MPI_BAND, MPI_BOR, MPI_BXOR, MPI_MINLOC };
	static const char *const names[] = { "sum", "prod", "min", "max", "land", "lor", "lxor",
					     "band", "bor", "bxor", "minloc" };
	for (size_t o = 0; o < sizeof ops / sizeof *ops; o++)
		if (ops[o] == op)
			return names[o];
	return "of the user";
}

static void reductions(const struct type *t, MPI_Op op, int count, int ours)
{
	int type_len, mine = count / size * size, block = mine / size;
	MPI_Type_size(t->mpi, &type_len);
	size_t len = (size_t) count * type_len, part = (size_t) block * type_len;
	snprintf(trying, sizeof trying, "%s, %s, %d", t->name, op_name(op), count);
	fold(t, op, count);
	fill(in, t, rank, count);

	memset(out, 0x55, len + 1);
	CALL("MPI_Allreduce", ours, AS(allreduce, in, out, count, t->mpi, op, comm));
	equal(t, out, want, len, "MPI_Allreduce");
	check(out[len] == 0x55, "MPI_Allreduce", "wrote behind its result");
	memcpy(out, in, len);
	CALL("MPI_Allreduce in place", ours,
	     AS(allreduce, MPI_IN_PLACE, out, count, t->mpi, op, comm));
	equal(t, out, want, len, "MPI_Allreduce in place");

	for (int root = 0; root < size; root += across == LATE ? size : size - 1) {
		memset(out, 0x55, len + 1);
		CALL("MPI_Reduce", ours, AS(reduce, in, out, count, t->mpi, op, root, comm));
		if (rank == root)
			equal(t, out, want, len, "MPI_Reduce");
		check(out[rank == root ? len : 0] == 0x55, "MPI_Reduce", "wrote elsewhere");
		memcpy(out, in, len);
		CALL("MPI_Reduce in place", ours,
		     rank == root ? AS(reduce, MPI_IN_PLACE, out, count, t->mpi, op, root, comm)
				  : AS(reduce, in, NULL, count, t->mpi, op, root, comm));
		if (rank == root)
			equal(t, out, want, len, "MPI_Reduce in place");
	}

	if (block == 0)
		return;
	memset(out, 0x55, part + 1);
	ours = ours ? ours : EITHER;
	CALL("MPI_Reduce_scatter_block", ours,
	     AS(reduce_scatter_block, in, out, block, t->mpi, op, comm));
	equal(t, out, want + rank * part, part, "MPI_Reduce_scatter_block");
	check(out[part] == 0x55, "MPI_Reduce_scatter_block", "wrote behind its result");
	memcpy(out, in, len);
	CALL("MPI_Reduce_scatter_block in place", ours,
	     AS(reduce_scatter_block, MPI_IN_PLACE, out, block, t->mpi, op, comm));
	equal(t, out, want + rank * part, part, "MPI_Reduce_scatter_block in place");
}

/* x -> ax + b after x -> cx + d: the order matters. */
static void compose(void *first, void *second, int *count, MPI_Datatype *type)
{
	unsigned *f = first, *s = second;
	(void) type;
	for (int i = 0; i < *count; i++, f += 2, s += 2) {
		s[1] = f[0] * s[1] + f[1];
		s[0] = f[0] * s[0];
	}
}

static void sum(void *first, void *second, int *count, MPI_Datatype *type)
{
	(void) type;
	for (int i = 0; i < *count; i++)
		((int *) second)[i] += ((int *) first)[i];
}

static const MPI_Op SHORT_OPS[] = { MPI_SUM, MPI_MIN, MPI_MAX };

/* MPICH has the types, and may lack their reductions. */
static void halves(int count)
{
#ifdef MPIX_BFLOAT16
	const struct type shorts[] = {
		{ "float16", MPIX_C_FLOAT16, 'h' }, { "bfloat16", MPIX_BFLOAT16, 'u' },
	};

	for (size_t t = 0; t < 2; t++)
		for (int o = 0; o < 3; o++)
			reductions(&shorts[t], SHORT_OPS[o], count, 1);
#else
	(void) count;
#endif
}

static void all_reductions(void)
{
	const struct type ints[] = {
		{ "int8", MPI_INT8_T, 'i' }, { "uint8", MPI_UINT8_T, 'i' },
		{ "short", MPI_SHORT, 'i' },
		{ "uint16", MPI_UINT16_T, 'i' }, { "int", MPI_INT, 'i' },
		{ "unsigned", MPI_UNSIGNED, 'i' }, { "long", MPI_LONG, 'i' },
		{ "unsigned long", MPI_UNSIGNED_LONG, 'i' }, { "long long", MPI_LONG_LONG, 'i' },
		{ "uint64", MPI_UINT64_T, 'i' },
	}, floats[] = {
		{ "float", MPI_FLOAT, 'f' }, { "double", MPI_DOUBLE, 'd' },
		{ "long double", MPI_LONG_DOUBLE, 'l' },
	}, complexes[] = {
		{ "float complex", MPI_C_FLOAT_COMPLEX, 'F' },
		{ "double complex", MPI_C_DOUBLE_COMPLEX, 'D' },
		{ "long double complex", MPI_C_LONG_DOUBLE_COMPLEX, 'L' },
	}, addr = { "MPI_Aint", MPI_AINT, 'i' }, bools = { "bool", MPI_C_BOOL, 'b' },
	  bytes = { "byte", MPI_BYTE, 'i' }, pair = { "2int", MPI_2INT, 'p' };
	const MPI_Op ops[] = { MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX, MPI_LAND, MPI_LOR, MPI_LXOR,
			       MPI_BAND, MPI_BOR, MPI_BXOR };
	int few = 4 * size;

	for (size_t t = 0; t < sizeof ints / sizeof *ints; t++)
		for (int o = 0; o < 10; o++)
			reductions(&ints[t], ops[o], few, 1);
	for (size_t t = 0; t < 3; t++)
		for (int o = 0; o < 4; o++)
			reductions(&floats[t], ops[o], few, 1);
	for (size_t t = 0; t < 3; t++)
		for (int o = 0; o < 2; o++)
			reductions(&complexes[t], ops[o], few, 1);
	if (!without)
		halves(few);
	reductions(&addr, MPI_SUM, few, 1);
	for (int o = 0; o < 3; o++) {
		reductions(&bools, ops[4 + o], few, 1);
		reductions(&bytes, ops[7 + o], few, 1);
	}
	reductions(&pair, MPI_MINLOC, few, 0);

	MPI_Op in_order, any_order;
	MPI_Op_create(compose, 0, &in_order);
	MPI_Op_create(sum, 1, &any_order);
	reductions(&pair, in_order, few, 0);
	reductions(&ints[4], any_order, few, 0);
	MPI_Op_free(&in_order);
	MPI_Op_free(&any_order);
	int a = rank, zero = 0;
	CALL("MPI_Allreduce of nothing", 0, AS(allreduce, &a, &zero, 0, MPI_INT, MPI_SUM, comm));
}

/* ---- Blocks that move ---- */

static int element(int from, int to, int i) { return from * 100003 + to * 1009 + i; }

/* A block as ints one behind the other, or with gaps. */
struct layout {
	MPI_Datatype mpi;
	int stride, count_of;
};

static void lay(unsigned char *at, const struct layout *l, int block, int count, int from, int to)
{
	int *ints = (int *) at + (size_t) block * count * l->stride;
	for (int i = 0; i < count; i++)
		ints[(size_t) i * l->stride] = element(from, to, i);
}

static void lies(const unsigned char *at, const struct layout *l, int block, int count, int from,
		 int to, const char *what)
{
	const int *ints = (const int *) at + (size_t) block * count * l->stride;
	for (int i = 0; i < count; i++) {
		int gap = l->stride == 1 || ints[(size_t) i * l->stride + 1] == 0x55555555;
		check(ints[(size_t) i * l->stride] == element(from, to, i) && gap, what, "wrong");
	}
}

static void clear(const struct layout *l, int count)
{
	size_t len = (size_t) count * size * l->stride * sizeof(int);
	memset(in, 0x55, len + 8);
	memset(out, 0x55, len + 8);
}

static void barriers_and_roots(const struct layout *l, int count, int ours)
{
	int c = count / l->count_of, waits_for = across == LATE ? 1 : 0;

	CALL("MPI_Barrier", 1, AS(barrier, comm));
	for (int root = waits_for; root < size; root += size > 1 + waits_for ? size - 1 : size) {
		clear(l, count);
		if (rank == root)
			lay(out, l, 0, count, root, 0);
		CALL("MPI_Bcast", ours, AS(bcast, out, c, l->mpi, root, comm));
		lies(out, l, 0, count, root, 0, "MPI_Bcast");

		clear(l, count);
		for (int r = 0; r < size && rank == root; r++)
			lay(in, l, r, count, root, r);
		CALL("MPI_Scatter", ours, AS(scatter, in, c, l->mpi, out, c, l->mpi, root, comm));
		lies(out, l, 0, count, root, rank, "MPI_Scatter");
		memset(out, 0x55, (size_t) count * l->stride * sizeof(int));
		CALL("MPI_Scatter in place", ours,
		     rank == root ? AS(scatter, in, c, l->mpi, MPI_IN_PLACE, 0, MPI_INT, root, comm)
				  : AS(scatter, NULL, 0, MPI_INT, out, c, l->mpi, root, comm));
		if (rank != root)
			lies(out, l, 0, count, root, rank, "MPI_Scatter in place");
	}
	for (int root = 0; root < size; root += across == LATE ? size : size - 1) {
		clear(l, count);
		lay(in, l, 0, count, rank, root);
		CALL("MPI_Gather", ours, AS(gather, in, c, l->mpi, out, c, l->mpi, root, comm));
		for (int r = 0; r < size && rank == root; r++)
			lies(out, l, r, count, r, root, "MPI_Gather");
		clear(l, count);
		lay(in, l, 0, count, rank, root);
		lay(out, l, rank, count, rank, root);
		CALL("MPI_Gather in place", ours,
		     rank == root ? AS(gather, MPI_IN_PLACE, 0, MPI_INT, out, c, l->mpi, root, comm)
				  : AS(gather, in, c, l->mpi, NULL, 0, MPI_INT, root, comm));
		for (int r = 0; r < size && rank == root; r++)
			lies(out, l, r, count, r, root, "MPI_Gather in place");
	}
}

static void exchanges(const struct layout *l, int count, int ours)
{
	int c = count / l->count_of;

	for (int in_place = 0; in_place < 2; in_place++) {
		clear(l, count);
		lay(in_place ? out : in, l, in_place ? rank : 0, count, rank, 0);
		CALL("MPI_Allgather", ours,
		     in_place ? AS(allgather, MPI_IN_PLACE, 0, MPI_INT, out, c, l->mpi, comm)
			      : AS(allgather, in, c, l->mpi, out, c, l->mpi, comm));
		for (int r = 0; r < size; r++)
			lies(out, l, r, count, r, 0, "MPI_Allgather");
		clear(l, count);
		for (int r = 0; r < size; r++)
			lay(in_place ? out : in, l, r, count, rank, r);
		CALL("MPI_Alltoall", ours,
		     in_place ? AS(alltoall, MPI_IN_PLACE, 0, MPI_INT, out, c, l->mpi, comm)
			      : AS(alltoall, in, c, l->mpi, out, c, l->mpi, comm));
		for (int r = 0; r < size; r++)
			lies(out, l, r, count, r, rank, "MPI_Alltoall");
	}
}

static void moves(int count, int ours)
{
	struct layout plain = { MPI_INT, 1, 1 }, gaps = { MPI_DATATYPE_NULL, 2, 4 };
	MPI_Datatype four;
	MPI_Type_vector(4, 1, 2, MPI_INT, &four);
	/* So that the next one begins a gap behind the last. */
	MPI_Type_create_resized(four, 0, 8 * sizeof(int), &gaps.mpi);
	MPI_Type_commit(&gaps.mpi);
	MPI_Type_free(&four);
	snprintf(trying, sizeof trying, "%d ints", count);
	barriers_and_roots(&plain, count, ours);
	exchanges(&plain, count, ours);
	snprintf(trying, sizeof trying, "%d ints, some with gaps", count);
	/* Who packs does not decide for the others. */
	barriers_and_roots(rank % 2 ? &gaps : &plain, count, ours);
	exchanges(rank % 2 ? &gaps : &plain, count, ours);
	MPI_Type_free(&gaps.mpi);
}

/* ---- Communicators ---- */

static void quick(MPI_Comm c, int n, int ours)
{
	long me, sum = 0, from;
	int its_size, its_rank;
	MPI_Comm_size(c, &its_size);
	MPI_Comm_rank(c, &its_rank);
	me = its_rank + n;
	from = its_rank == n % its_size ? n : -1;
	unsigned long before = made();
	MPI_Allreduce(&me, &sum, 1, MPI_LONG, MPI_SUM, c);
	MPI_Bcast(&from, 1, MPI_LONG, n % its_size, c);
	int expected = ours && its_size > 1 ? 2 : 0;
	long all = (long) its_size * n + its_size * (its_size - 1l) / 2;
	check(sum == all, "a communicator's sum", "");
	check(from == n, "a communicator's broadcast", "");
	check(without || made() - before == (unsigned long) expected, "a communicator's calls", "");
}

static void come_and_go(int times)
{
	MPI_Comm a, b, c, d, kept[40];
	MPI_Request three[3];
	long me = rank, sum, all = size * (size - 1l) / 2;
	unsigned long before;
	for (int n = 0; n < times; n++) {
		MPI_Comm_dup(comm, &a);
		MPI_Comm_split(comm, rank % 2, -rank, &b);
		MPI_Comm_idup(a, &c, &three[0]);
		MPI_Comm_idup(comm, &d, &three[1]);
		quick(b, n, 1);
		quick(a, n, 1);
		/*
		 * MPI_Comm_idup makes calls of its own on the communicator, at any time. Open MPI
		 * by itself confuses them with the program's.
		 */
		before = made();
		if (without || LEFT_REQUESTS)
			MPI_Waitall(2, three, MPI_STATUSES_IGNORE);
		MPI_Iallreduce(&me, &sum, 1, MPI_LONG, MPI_SUM, a, &three[2]);
		/* Those that have ended are MPI_REQUEST_NULL. */
		MPI_Waitall(3, three, MPI_STATUSES_IGNORE);
		check(sum == all, "a sum with a request", "");
		check(without || LEFT_REQUESTS || made() - before == 1, "a sum with a request",
		      "is others'");
		for (int k = 0; k < 3; k++) {
			quick(c, n + k, 1);
			quick(a, n + k, 1);
			quick(d, n + k, 1);
			quick(b, n + k, 1);
		}
		MPI_Comm_free(&a);
		/* Never called. */
		MPI_Comm_dup(c, &a);
		MPI_Comm_free(&c);
		MPI_Comm_free(&b);
		MPI_Comm_free(&d);
		MPI_Comm_free(&a);
	}
	/* More than the groups that go through memory. */
	for (int n = 0; n < 40; n++) {
		MPI_Comm_dup(comm, &kept[n]);
		quick(kept[n], n, 1);
	}
	for (int n = 0; n < 40; n++)
		quick(kept[n], n, 1);
	for (int n = 0; n < 40; n++)
		MPI_Comm_free(&kept[n]);
}

/*
 * Who has made all his calls may leave, however far behind others are: blocks that are too long for
 * the group's memory, and so short that nobody waits for the rank that is late.
 */
static void leave_first(void)
{
	MPI_Comm c;
	int count = 600, late = size - 1;
	for (int n = 0; n < 3; n++) {
		MPI_Comm_dup(comm, &c);
		MPI_Barrier(c);
		if (rank == late)
			usleep(30000);
		for (int call = 0; call < 5; call++) {
			for (int i = 0; i < count * size; i++)
				((int *) in)[i] = element(call, i / count, i);
			memset(out, 0x55, count * sizeof(int));
			MPI_Scatter(in, count, MPI_INT, out, count, MPI_INT, 0, c);
			int i = count - 1;
			check(((int *) out)[i] == element(call, rank, rank * count + i),
			      "MPI_Scatter to who is late", "wrong");
		}
		MPI_Comm_free(&c);
	}
}

/*
 * More calls than find room, before one rank makes the first. Open MPI by itself returns from as
 * many as there is room for.
 */
#define AT_ONCE 5000

static void meet(MPI_Comm c)
{
	MPI_Request request;
	MPI_Barrier(c);
	MPI_Ibarrier(c, &request);
	MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void all_at_once(void)
{
	static MPI_Request requests[AT_ONCE];
	static long sums[AT_ONCE], words[AT_ONCE];
	MPI_Comm c, other;
	long me = rank, total = 0, all = size * (size - 1l) / 2;
	char nothing = 0;
	int count = without ? 300 : AT_ONCE;
	MPI_Comm_dup(comm, &c);
	MPI_Comm_dup(comm, &other);
	MPI_Barrier(other);
	unsigned long before = made();
	MPI_Ibarrier(c, &requests[0]);
	MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
	check(made() == before, "the first call, which must not wait", "is the component's");
	MPI_Barrier(c);
	before = made();
	/* Rank 0 begins when the others have returned from all, and met it on another one. */
	for (int r = 1; rank == 0 && r < size; r++)
		MPI_Recv(&nothing, 1, MPI_CHAR, r, 3, comm, MPI_STATUS_IGNORE);
	if (rank == 0)
		meet(other);
	for (int n = 0; n < count; n++) {
		words[n] = rank == n % size ? n : -1;
		if (n % 3 == 0)
			MPI_Ibarrier(c, &requests[n]);
		else if (n % 3 == 1)
			MPI_Iallreduce(&me, &sums[n], 1, MPI_LONG, MPI_SUM, c, &requests[n]);
		else
			MPI_Ibcast(&words[n], 1, MPI_LONG, n % size, c, &requests[n]);
	}
	if (rank != 0) {
		MPI_Send(&nothing, 1, MPI_CHAR, 0, 3, comm);
		meet(other);
	}
	/* Behind all of them, while the others' are over. */
	if (rank != 0)
		MPI_Wait(&requests[count - 1], MPI_STATUS_IGNORE);
	MPI_Allreduce(&me, &total, 1, MPI_LONG, MPI_SUM, c);
	check(total == all, "a call behind many requests", "wrong");
	MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
	for (int n = 0; n < count; n++) {
		check(n % 3 != 1 || sums[n] == all, "MPI_Iallreduce of many", "wrong");
		check(n % 3 != 2 || words[n] == n, "MPI_Ibcast of many", "wrong");
	}
	check(without || made() - before == count + 3ul, "many at once", "are others'");
	if (!without) {
		/* Requests outlive their communicator, those that wait for room among them. */
		for (int n = 0; n < count; n++)
			MPI_Iallreduce(&me, &sums[n], 1, MPI_LONG, MPI_SUM, c, &requests[n]);
		MPI_Comm_free(&c);
		MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
		for (int n = 0; n < count; n++)
			check(sums[n] == all, "requests without their communicator", "wrong");
	} else {
		MPI_Comm_free(&c);
	}
	MPI_Comm_free(&other);
}

static void between(void)
{
	MPI_Comm half, inter, merged;
	int sum = 0, one_each = 1, halves[2] = { (size + 1) / 2, size / 2 };
	MPI_Comm_split(comm, rank % 2, rank, &half);
	MPI_Intercomm_create(half, 0, comm, 1 - rank % 2, 9, &inter);
	/* Left to others, which make calls of the local group for it. */
	MPI_Barrier(inter);
	MPI_Allreduce(&one_each, &sum, 1, MPI_INT, MPI_SUM, inter);
	check(sum == halves[1 - rank % 2], "MPI_Allreduce between two groups", "");
	MPI_Intercomm_merge(inter, rank % 2, &merged);
	quick(merged, 3, 1);
	MPI_Comm_free(&merged);
	MPI_Comm_free(&inter);
	MPI_Comm_free(&half);
}

/* ---- Threads ---- */

static void *own_communicator(void *at)
{
	MPI_Comm c = *(MPI_Comm *) at;
	for (long n = 0; n < 300; n++) {
		long me = rank + n, sum = 0;
		MPI_Request request;
		if (n % 2) {
			MPI_Iallreduce(&me, &sum, 1, MPI_LONG, MPI_SUM, c, &request);
			MPI_Wait(&request, MPI_STATUS_IGNORE);
		} else {
			MPI_Allreduce(&me, &sum, 1, MPI_LONG, MPI_SUM, c);
		}
		if (sum != size * n + size * (size - 1l) / 2)
			return "BAD";
	}
	return NULL;
}

/* Three threads, whose communicators get their groups by turns or all at once. */
static void threads(int by_turns)
{
	pthread_t thread[3];
	MPI_Comm comms[3];
	void *said;
	unsigned long before = made();
	for (int t = 0; t < 3; t++) {
		MPI_Comm_dup(comm, &comms[t]);
		if (by_turns)
			MPI_Barrier(comms[t]);
	}
	for (int t = 0; t < 3; t++)
		pthread_create(&thread[t], NULL, own_communicator, &comms[t]);
	for (int t = 0; t < 3; t++) {
		pthread_join(thread[t], &said);
		check(!said, "a thread's sum", "");
		MPI_Comm_free(&comms[t]);
	}
	/* At once they can be taken for one another, and some calls are others'. */
	check(!by_turns || made() - before >= (LEFT_REQUESTS ? 450 : 900), "calls of threads",
	      "were not made by barewire");
}

/* ---- What is not a number of calls ---- */

/* An address of its own in place of a buffer. */
static void at_the_bottom(void)
{
	int value[2] = { rank ? -1 : 5, rank ? -1 : 6 }, lengths[2] = { 1, 1 };
	MPI_Aint at[2];
	MPI_Datatype there;
	MPI_Get_address(&value[1], &at[0]);
	MPI_Get_address(&value[0], &at[1]);
	MPI_Type_create_hindexed(2, lengths, at, MPI_INT, &there);
	MPI_Type_commit(&there);
	trying[0] = 0;
	CALL("MPI_Bcast of MPI_BOTTOM", 1, MPI_Bcast(MPI_BOTTOM, 1, there, 0, comm));
	check(value[0] == 5 && value[1] == 6, "MPI_Bcast of MPI_BOTTOM", "wrong");
	/* The same bytes in the other order. */
	value[0] = rank ? -1 : 7;
	value[1] = rank ? -1 : 8;
	if (rank)
		CALL("MPI_Bcast in order", 1, MPI_Bcast(value, 2, MPI_INT, 0, comm));
	else
		CALL("MPI_Bcast out of order", 1, MPI_Bcast(MPI_BOTTOM, 1, there, 0, comm));
	check(value[rank ? 1 : 0] == 7 && value[rank ? 0 : 1] == 8, "MPI_Bcast out of order", "wrong");
	MPI_Type_free(&there);
}

/* Members need not have counts of one type. */
static void large_counts(void)
{
#if MPI_VERSION >= 4
	long me = rank, sum = 0, all = size * (size - 1l) / 2;
	long *each = (long *) in, *got = (long *) out;
	unsigned long before = made();
	int large = rank % 2;
	for (int r = 0; r < size; r++)
		each[r] = rank * 100 + r;
	large ? MPI_Allreduce_c(&me, &sum, 1, MPI_LONG, MPI_SUM, comm)
	      : MPI_Allreduce(&me, &sum, 1, MPI_LONG, MPI_SUM, comm);
	check(sum == all, "MPI_Allreduce_c", "wrong");
	large ? MPI_Reduce_c(&me, &sum, 1, MPI_LONG, MPI_MAX, 0, comm)
	      : MPI_Reduce(&me, &sum, 1, MPI_LONG, MPI_MAX, 0, comm);
	check(rank || sum == size - 1, "MPI_Reduce_c", "wrong");
	large ? MPI_Reduce_scatter_block_c(each, &sum, 1, MPI_LONG, MPI_SUM, comm)
	      : MPI_Reduce_scatter_block(each, &sum, 1, MPI_LONG, MPI_SUM, comm);
	check(sum == 100 * all + size * rank, "MPI_Reduce_scatter_block_c", "wrong");
	large ? MPI_Bcast_c(&me, 1, MPI_LONG, size - 1, comm)
	      : MPI_Bcast(&me, 1, MPI_LONG, size - 1, comm);
	check(me == size - 1, "MPI_Bcast_c", "wrong");
	large ? MPI_Alltoall_c(each, 1, MPI_LONG, got, 1, MPI_LONG, comm)
	      : MPI_Alltoall(each, 1, MPI_LONG, got, 1, MPI_LONG, comm);
	for (int r = 0; r < size; r++)
		check(got[r] == r * 100 + rank, "MPI_Alltoall_c", "wrong");
	large ? MPI_Allgather_c(each, 1, MPI_LONG, got, 1, MPI_LONG, comm)
	      : MPI_Allgather(each, 1, MPI_LONG, got, 1, MPI_LONG, comm);
	for (int r = 0; r < size; r++)
		check(got[r] == r * 100, "MPI_Allgather_c", "wrong");
	large ? MPI_Gather_c(each, 1, MPI_LONG, got, 1, MPI_LONG, 0, comm)
	      : MPI_Gather(each, 1, MPI_LONG, got, 1, MPI_LONG, 0, comm);
	for (int r = 0; r < size && rank == 0; r++)
		check(got[r] == r * 100, "MPI_Gather_c", "wrong");
	large ? MPI_Scatter_c(each, 1, MPI_LONG, &sum, 1, MPI_LONG, 0, comm)
	      : MPI_Scatter(each, 1, MPI_LONG, &sum, 1, MPI_LONG, 0, comm);
	check(sum == rank, "MPI_Scatter_c", "wrong");
	check(without || made() - before == 8, "large counts", "are others'");
#endif
}

/*
 * Calls of the communicator's handler, and what the last was told. MPICH returns MPI_SUCCESS from
 * calls whose error was handled.
 */
static int handled, error;

static void handle_error(MPI_Comm *c, int *err, ...)
{
	(void) c;
	MPI_Error_class(*err, &error);
	handled++;
}

static void set_handler(MPI_Comm c)
{
	MPI_Errhandler handler;
	MPI_Comm_create_errhandler(handle_error, &handler);
	MPI_Comm_set_errhandler(c, handler);
	MPI_Errhandler_free(&handler);
}

/* What is wrong with a call is said by the MPI. */
static void mistakes(void)
{
	MPI_Comm c;
	int value = 0, *from = calloc(size, sizeof *from), *to = calloc(size, sizeof *to);
	MPI_Comm_dup(comm, &c);
	MPI_Barrier(c);
	set_handler(c);
	handled = 0;
	MPI_Bcast(&value, 1, MPI_INT, size, c);
	check(error == MPI_ERR_ROOT && handled == 1, "a wrong root", "is not told");
	MPI_Bcast(&value, -1, MPI_INT, 0, c);
	check(error == MPI_ERR_COUNT && handled == 2, "a wrong count", "is not told");
	MPI_Bcast(&value, 1, MPI_DATATYPE_NULL, 0, c);
	check(error == MPI_ERR_TYPE && handled == 3, "no type", "is not told");
	/* What is sent, where what comes tells the length of a block. */
	MPI_Allgather(from, -1, MPI_INT, to, 1, MPI_INT, c);
	check(error == MPI_ERR_COUNT && handled == 4, "a wrong count to send", "is not told");
	MPI_Alltoall(from, 1, MPI_DATATYPE_NULL, to, 1, MPI_INT, c);
	check(error == MPI_ERR_TYPE && handled == 5, "no type to send", "is not told");
	free(from);
	free(to);
	MPI_Barrier(c);
	MPI_Comm_free(&c);
}

/* ---- A rank that dies ---- */

/* Waits in one of three ways, each rank's own. */
static int wait_somehow(MPI_Request *request)
{
	MPI_Request two[2] = { MPI_REQUEST_NULL, *request };
	int err = MPI_SUCCESS, at = 0, flag = 0;

	if (rank % 3 == 0)
		return MPI_Wait(request, MPI_STATUS_IGNORE);
	if (rank % 3 == 1)
		return MPI_Waitall(2, two, MPI_STATUSES_IGNORE);
	while (!flag && !err && !handled)
		err = MPI_Testany(2, two, &at, &flag, MPI_STATUS_IGNORE);
	return err;
}

/* A sum with a request. */
static int sum_somehow(MPI_Comm c)
{
	int one_each = 1, sum = -1;
	int err = MPI_Iallreduce(&one_each, &sum, 1, MPI_INT, MPI_SUM, c, &asked);

	if (err == MPI_SUCCESS && !handled)
		err = wait_somehow(&asked);
	check(err != MPI_SUCCESS || handled || sum == size, "a sum without all ranks", "succeeds");
	return err;
}

static void die(void)
{
	MPI_Comm c = comm;
	int err = MPI_SUCCESS;
	/* By which MPICH's launcher tells of a death. */
	signal(SIGUSR1, SIG_IGN);
	/* Open MPI takes the errors of the component's requests to this one's handler. */
	if (library)
		MPI_Comm_dup(comm, &c);
	set_handler(c);
	for (int n = 0; n < 1000; n++)
		MPI_Barrier(c);
	if (rank == size - 1)
		raise(SIGKILL);
	double begun = MPI_Wtime();
	while (err == MPI_SUCCESS && !handled)
		err = asking ? sum_somehow(c) : MPI_Barrier(c);
	int good = error == MPI_ERR_OTHER && handled == 1 && !wrong;
	printf("rank %d got %s after %.1f s\n", rank, good ? "MPI_ERR_OTHER" : "BAD",
	       MPI_Wtime() - begun);
	fflush(stdout);
	_exit(!good);
}

/* ---- Times ---- */

#define BATCHES 201

/*
 * Communicators of the same ranks, whose batches are timed by turns. With the library the second
 * has its calls made by the MPI, by their other names.
 */
static const char *const BY[] = { "barewire", "tuned", "sm" };
#define WHOSE 3
static MPI_Comm timed[WHOSE];
static int whose = WHOSE;

static int by_size(const void *a, const void *b)
{
	double x = *(const double *) a, y = *(const double *) b;
	return (x > y) - (x < y);
}

enum call { BARRIER, ALLREDUCE, BCAST, REDUCE, ALLGATHER, ALLTOALL };

/* A call by the functions `MPI_*`; `len` is the bytes of the vector, or of all blocks of a rank. */
static void one_call(MPI_Comm c, enum call what, int len, int root)
{
	int block = len / size;

	if (what == BARRIER)
		AS(barrier, c);
	else if (what == ALLREDUCE)
		AS(allreduce, in, out, len / 8, MPI_DOUBLE, MPI_SUM, c);
	else if (what == BCAST)
		AS(bcast, out, len, MPI_BYTE, root, c);
	else if (what == REDUCE)
		AS(reduce, in, out, len / 8, MPI_DOUBLE, MPI_SUM, root, c);
	else if (what == ALLGATHER)
		AS(allgather, in, block, MPI_BYTE, out, block, MPI_BYTE, c);
	else
		AS(alltoall, in, block, MPI_BYTE, out, block, MPI_BYTE, c);
}

/* The same by the MPI's own functions. */
#define OTHERS(name, NAME, ...) \
	(asking ? PMPI_I##name(__VA_ARGS__, &asked) : PMPI_##NAME(__VA_ARGS__))

static void others_call(MPI_Comm c, enum call what, int len, int root)
{
	int block = len / size;

	if (what == BARRIER)
		OTHERS(barrier, Barrier, c);
	else if (what == ALLREDUCE)
		OTHERS(allreduce, Allreduce, in, out, len / 8, MPI_DOUBLE, MPI_SUM, c);
	else if (what == BCAST)
		OTHERS(bcast, Bcast, out, len, MPI_BYTE, root, c);
	else if (what == REDUCE)
		OTHERS(reduce, Reduce, in, out, len / 8, MPI_DOUBLE, MPI_SUM, root, c);
	else if (what == ALLGATHER)
		OTHERS(allgather, Allgather, in, block, MPI_BYTE, out, block, MPI_BYTE, c);
	else
		OTHERS(alltoall, Alltoall, in, block, MPI_BYTE, out, block, MPI_BYTE, c);
	if (asking)
		PMPI_Wait(&asked, MPI_STATUS_IGNORE);
}

static double batch(MPI_Comm c, enum call what, int len, int calls)
{
	int others = library && c == timed[1];
	others ? PMPI_Barrier(c) : MPI_Barrier(c);
	double begun = MPI_Wtime();
	for (int n = 0; n < calls; n++) {
		if (others)
			others_call(c, what, len, n % size);
		else
			one_call(c, what, len, n % size);
	}
	return (MPI_Wtime() - begun) / calls * 1e6;
}

/* Median (and p99) of a call in microseconds; the root changes from call to call. */
static void time_of(enum call what, int len)
{
	static const char *const names[] = {
		"barrier", "allreduce", "bcast", "reduce", "allgather", "alltoall"
	};
	static double took[WHOSE][BATCHES];
	int calls = len > 65536 ? 5 : len > 8192 ? 20 : 200;
	for (int b = 0; b < BATCHES; b++)
		for (int w = 0; w < whose; w++)
			took[w][b] = batch(timed[w], what, len, calls);
	if (rank == 0)
		printf("%c%-9s %7d B", asking ? 'i' : ' ', names[what], len);
	for (int w = 0; w < whose; w++) {
		qsort(took[w], BATCHES, sizeof **took, by_size);
		if (rank == 0)
			printf("  %s %8.2f (%8.2f)", library && w ? "MPI" : BY[w], took[w][BATCHES / 2],
			       took[w][BATCHES * 99 / 100]);
	}
	if (rank == 0)
		printf("  us, %d batches of %d\n", BATCHES, calls);
}

/* The other communicators keep from barewire. */
static void bench(void)
{
	static const char *const without_it[] = { "", "^barewire", "sm,^barewire" };
	MPI_Comm_dup(comm, &timed[0]);
	if (library)
		MPI_Comm_dup(comm, &timed[1]);
	whose = library ? 2 : WHOSE;
	for (int w = 1; w < whose && !library; w++) {
		MPI_Info info;
		MPI_Info_create(&info);
		MPI_Info_set(info, "ompi_comm_coll_preference", without_it[w]);
		MPI_Comm_dup_with_info(comm, info, &timed[w]);
		MPI_Info_free(&info);
	}
	unsigned long before = made();
	batch(timed[1], BARRIER, 0, 10);
	if (!library)
		batch(timed[2], ALLREDUCE, 8, 10);
	check(made() == before, "a communicator that keeps from the component", "does not");
	batch(timed[0], BARRIER, 0, 10);
	check(made() == before + 11, "a communicator for the component", "is not");
	for (asking = 0; asking < (LEFT_REQUESTS ? 1 : 2); asking++) {
		time_of(BARRIER, 0);
		for (int what = ALLREDUCE; what <= ALLTOALL; what++)
			for (int len = 8; len <= 1 << 20; len *= len == 8 ? 32 : 4)
				time_of(what, len);
	}
	for (int w = 0; w < whose; w++)
		MPI_Comm_free(&timed[w]);
}

static void every_call(void)
{
	const struct type some = { "double", MPI_DOUBLE, 'd' };
	if (across == NOTHING)
		all_reductions();
	else
		reductions(&some, MPI_SUM, 4 * size, 1);
	reductions(&some, MPI_SUM, 1000 * size, 1);
	if (across == NOTHING)
		reductions(&some, MPI_SUM, MAX_COUNT + size, 0);
	moves(4, 1);
	moves(1200, 1);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "all";
	int provided, all_wrong = 0, many = !strcmp(what, "threads");
	int short_floats = !strcmp(what, "halves"), others = !many && !short_floats;
	without = argc > 2 && !strcmp(argv[2], "none");
	MPI_Init_thread(&argc, &argv, many ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
	comm = MPI_COMM_WORLD;
	MPI_Comm_rank(comm, &rank);
	MPI_Comm_size(comm, &size);
	size_t len = (size_t) MAX_COUNT * size * 8 + 64;
	unsigned char **buffers[] = { &in, &out, &want, &one };
	for (int b = 0; b < 4; b++)
		*buffers[b] = calloc(1, len);
	sent = malloc(LONG_MESSAGE);
	received = malloc(LONG_MESSAGE);
	for (int i = 0; i < LONG_MESSAGE; i++)
		sent[i] = i * 31 + (i >> 8);
	find_counter();
	if (!strcmp(what, "bench")) {
		bench();
		MPI_Finalize();
		return wrong != 0;
	}
	if (!strcmp(what, "die")) {
		asking = argc > 2;
		die();
	}
	for (int n = 0; many && n < 5; n++)
		threads(n == 0);
	for (asking = 0; asking < 2 && short_floats; asking++) {
		halves(600 * size);
		halves(MAX_COUNT);
	}
	for (asking = 0; asking < 2 && others; asking++)
		for (across = NOTHING; across < WAYS; across++)
			every_call();
	asking = 0;
	across = NOTHING;
	if (others) {
		come_and_go(100);
		leave_first();
		if (!LEFT_REQUESTS)
			all_at_once();
		between();
		at_the_bottom();
		large_counts();
		mistakes();
	}
	MPI_Reduce(&wrong, &all_wrong, 1, MPI_INT, MPI_SUM, 0, comm);
	if (rank == 0 && all_wrong == 0)
		printf("all %d ranks agree, %lu calls\n", size, made());
	MPI_Finalize();
	return wrong != 0;
}
