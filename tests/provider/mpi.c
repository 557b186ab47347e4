/*
 * Every kind of MPI call once, with every byte looked at. Ends with "all N ranks agree". With
 * "small" the same with less of each; with "short" only collectives; with "forever" collectives
 * until somebody kills a rank.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, ranks;

#define WORLD MPI_COMM_WORLD
#define CHECK(what)                                                                     \
	do {                                                                            \
		if (!(what)) {                                                          \
			printf("rank %d, line %d: not %s\n", rank, __LINE__, #what);    \
			fflush(stdout);                                                 \
			MPI_Abort(WORLD, 1);                                            \
		}                                                                       \
	} while (0)

static int right(void) { return (rank + 1) % ranks; }
static int left(void) { return (rank + ranks - 1) % ranks; }

/* Messages around a ring, 1 B to so many. */
static void ring(long longest)
{
	for (long size = 1; size <= longest; size *= 4) {
		char *out = malloc(size), *in = calloc(1, size);
		memset(out, rank + 1, size);
		MPI_Sendrecv(out, size, MPI_CHAR, right(), 5, in, size, MPI_CHAR, left(), 5, WORLD,
			     MPI_STATUS_IGNORE);
		for (long i = 0; i < size; i++)
			CHECK(in[i] == left() + 1);
		free(out);
		free(in);
	}
}

static void collectives(int count)
{
	int *a = malloc(sizeof(int) * count * ranks), *b = malloc(sizeof(int) * count * ranks);
	int *counts = malloc(sizeof(int) * ranks);

	for (int i = 0; i < count; i++)
		a[i] = rank == 0 ? i : -1;
	MPI_Bcast(a, count, MPI_INT, 0, WORLD);
	for (int i = 0; i < count; i++)
		CHECK(a[i] == i);
	for (int i = 0; i < count; i++)
		a[i] = rank + i;
	MPI_Allreduce(a, b, count, MPI_INT, MPI_SUM, WORLD);
	for (int i = 0; i < count; i++)
		CHECK(b[i] == ranks * i + ranks * (ranks - 1) / 2);
	MPI_Reduce(a, b, count, MPI_INT, MPI_MAX, ranks - 1, WORLD);
	for (int i = 0; i < count && rank == ranks - 1; i++)
		CHECK(b[i] == ranks - 1 + i);
	MPI_Allgather(a, count, MPI_INT, b, count, MPI_INT, WORLD);
	for (int r = 0; r < ranks; r++)
		for (int i = 0; i < count; i++)
			CHECK(b[r * count + i] == r + i);
	for (int i = 0; i < count * ranks; i++)
		a[i] = rank * 1000 + i / count;
	MPI_Alltoall(a, count, MPI_INT, b, count, MPI_INT, WORLD);
	for (int r = 0; r < ranks; r++)
		for (int i = 0; i < count; i++)
			CHECK(b[r * count + i] == r * 1000 + rank);
	MPI_Gather(a, count, MPI_INT, b, count, MPI_INT, 0, WORLD);
	for (int r = 0; r < ranks && rank == 0; r++)
		CHECK(b[r * count] == r * 1000);
	MPI_Scatter(a, count, MPI_INT, b, count, MPI_INT, 0, WORLD);
	CHECK(b[0] == rank);
	MPI_Scan(a, b, count, MPI_INT, MPI_SUM, WORLD);
	CHECK(b[0] == 1000 * rank * (rank + 1) / 2);
	for (int r = 0; r < ranks; r++)
		counts[r] = count;
	MPI_Reduce_scatter(a, b, counts, MPI_INT, MPI_SUM, WORLD);
	for (int i = 0; i < count; i++)
		CHECK(b[i] == 1000 * ranks * (ranks - 1) / 2 + ranks * rank);
	MPI_Barrier(WORLD);
	free(a);
	free(b);
	free(counts);
}

static void derived_types(void)
{
	MPI_Datatype vector;
	double *out = calloc(700, sizeof(double)), *in = calloc(700, sizeof(double));

	MPI_Type_vector(100, 3, 7, MPI_DOUBLE, &vector);
	MPI_Type_commit(&vector);
	for (int i = 0; i < 700; i++)
		out[i] = rank * 1e4 + i;
	MPI_Sendrecv(out, 1, vector, right(), 1, in, 1, vector, left(), 1, WORLD,
		     MPI_STATUS_IGNORE);
	for (int i = 0; i < 700; i++)
		CHECK(in[i] == (i % 7 < 3 ? left() * 1e4 + i : 0));
	MPI_Type_free(&vector);
	free(out);
	free(in);
}

static void matching(int messages)
{
	for (int k = 0; k < messages; k++) {
		int out = k * rank, in, count;
		MPI_Request sent;
		MPI_Message found;
		MPI_Status s;
		MPI_Isend(&out, 1, MPI_INT, (k + rank) % ranks, k, WORLD, &sent);
		MPI_Probe(MPI_ANY_SOURCE, k, WORLD, &s);
		MPI_Get_count(&s, MPI_INT, &count);
		CHECK(count == 1);
		MPI_Mprobe(s.MPI_SOURCE, k, WORLD, &found, &s);
		MPI_Mrecv(&in, 1, MPI_INT, &found, &s);
		CHECK(in == k * s.MPI_SOURCE);
		MPI_Wait(&sent, MPI_STATUS_IGNORE);
	}
	int never, cancelled;
	MPI_Request request;
	MPI_Status s;
	MPI_Irecv(&never, 1, MPI_INT, MPI_ANY_SOURCE, 777, WORLD, &request);
	MPI_Cancel(&request);
	MPI_Wait(&request, &s);
	MPI_Test_cancelled(&s, &cancelled);
	CHECK(cancelled);
}

/* What nobody has asked for yet is kept, in order. */
static void unexpected(void)
{
	enum { COUNT = 1000, SIZE = 300 };
	static char out[COUNT][SIZE], bytes[SIZE];
	MPI_Request sent[COUNT];

	/* A blocking send may wait for its receive. */
	for (int k = 0; k < COUNT && rank == 0; k++) {
		memset(out[k], k, SIZE);
		MPI_Isend(out[k], SIZE, MPI_CHAR, ranks - 1, 3, WORLD, &sent[k]);
	}
	MPI_Barrier(WORLD);
	for (int k = 0; k < COUNT && rank == ranks - 1; k++) {
		MPI_Recv(bytes, SIZE, MPI_CHAR, 0, 3, WORLD, MPI_STATUS_IGNORE);
		CHECK(bytes[0] == (char) k && bytes[SIZE - 1] == (char) k);
	}
	if (rank == 0)
		MPI_Waitall(COUNT, sent, MPI_STATUSES_IGNORE);
}

static void one_sided(void)
{
	long *base, got[16], one = 1, old, put = rank + 5, swap = 77, add[8];
	MPI_Win win;

	MPI_Win_allocate(8 * 1024, 8, MPI_INFO_NULL, WORLD, &base, &win);
	for (int i = 0; i < 1024; i++)
		base[i] = rank * 10000 + i;
	MPI_Barrier(WORLD);
	MPI_Win_lock_all(0, win);
	MPI_Get(got, 16, MPI_LONG, right(), 100, 16, MPI_LONG, win);
	MPI_Win_flush(right(), win);
	for (int i = 0; i < 16; i++)
		CHECK(got[i] == right() * 10000 + 100 + i);
	for (int k = 0; k < 50; k++) {
		MPI_Fetch_and_op(&one, &old, MPI_LONG, 0, 0, MPI_SUM, win);
		MPI_Win_flush(0, win);
	}
	MPI_Win_unlock_all(win);
	MPI_Win_fence(0, win);
	CHECK(rank != 0 || base[0] == 50 * ranks);
	MPI_Put(&put, 1, MPI_LONG, right(), 500, 1, MPI_LONG, win);
	MPI_Win_fence(0, win);
	CHECK(base[500] == left() + 5);
	/* A neighbour that is ahead would swap the value before it is looked at. */
	MPI_Barrier(WORLD);
	MPI_Win_lock(MPI_LOCK_EXCLUSIVE, right(), 0, win);
	MPI_Compare_and_swap(&swap, &put, &old, MPI_LONG, right(), 500, win);
	MPI_Win_unlock(right(), win);
	CHECK(old == put);
	MPI_Win_fence(0, win);
	CHECK(base[500] == 77);
	for (int i = 0; i < 8; i++)
		add[i] = i;
	MPI_Accumulate(add, 8, MPI_LONG, 0, 600, 8, MPI_LONG, MPI_SUM, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < 8 && rank == 0; i++)
		CHECK(base[600 + i] == 600 + i + ranks * i);
	MPI_Win_free(&win);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(WORLD, &rank);
	MPI_Comm_size(WORLD, &ranks);
	if (argc > 1 && !strcmp(argv[1], "forever")) {
		printf("pid %d\n", (int) getpid());
		fflush(stdout);
		for (;;)
			collectives(1000);
	}
	if (argc > 1 && !strcmp(argv[1], "short")) {
		collectives(100);
		goto done;
	}
	int small = argc > 1 && !strcmp(argv[1], "small");
	ring(small ? 64 << 10 : 16 << 20);
	for (int count = 1; count <= (small ? 100 : 10000); count *= 10)
		collectives(count);
	derived_types();
	matching(small ? 10 : 100);
	unexpected();
	one_sided();
done:
	MPI_Barrier(WORLD);
	if (rank == 0)
		printf("all %d ranks agree\n", ranks);
	MPI_Finalize();
	return 0;
}
