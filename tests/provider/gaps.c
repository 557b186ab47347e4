/*
 * Messages between hosts, messages within each host meanwhile, and collectives, in a loop until the
 * file that is named exists, with every byte looked at. Says how long operations took at most, and
 * how messages within a host went on while one between hosts waited for long. Ends with "all N
 * ranks agree". Two ranks on each of two hosts.
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

/* A wait that shows that frames are lost. */
#define LONG 0.1
#define FAR_MAX 100000
#define NEAR_MAX 20000
#define COUNT 300

static char far_out[FAR_MAX], far_in[FAR_MAX], near_out[NEAR_MAX], near_in[NEAR_MAX];
static double far_longest, near_longest, coll_longest;
static long waits, lively, iterations;

static char byte_of(long n, int from, long i)
{
	return (char)(n * 31 + from * 7 + i * 3 + i / 251);
}

static void fill(char *to, long len, long n)
{
	for (long i = 0; i < len; i++)
		to[i] = byte_of(n, rank, i);
}

static void check(const char *in, long len, long n, int from)
{
	for (long i = 0; i < len; i++)
		CHECK(in[i] == byte_of(n, from, i));
}

/* One message each way within the host, whose first byte says that more is to come. */
static int near_round(int neighbour, long n, int goes_on)
{
	long len = n % 8 == 7 ? NEAR_MAX : 64;

	fill(near_out + 1, len - 1, n);
	near_out[0] = goes_on;
	MPI_Sendrecv(near_out, len, MPI_CHAR, neighbour, 1, near_in, len, MPI_CHAR, neighbour, 1,
		     WORLD, MPI_STATUS_IGNORE);
	check(near_in + 1, len - 1, n, neighbour);
	return goes_on || near_in[0];
}

/*
 * A message each way between hosts and a sum over all, and as many rounds within each host as that
 * takes.
 */
static void exchange(int there, int neighbour, long n)
{
	static long round;
	static int a[COUNT], b[COUNT];
	long len = 1 + n * 7919 % FAR_MAX, rounds = 0;
	double start, took = 0;
	MPI_Request all[3];
	int done = 0, goes_on;

	/* The neighbour may still be in the last collective, and wait for another host. */
	near_round(neighbour, round++, 0);
	start = MPI_Wtime();
	fill(far_out, len, n);
	memset(far_in, 0, len);
	MPI_Irecv(far_in, len, MPI_CHAR, there, 2, WORLD, &all[0]);
	MPI_Isend(far_out, len, MPI_CHAR, there, 2, WORLD, &all[1]);
	for (int i = 0; i < COUNT; i++)
		a[i] = rank + i + n;
	MPI_Iallreduce(a, b, COUNT, MPI_INT, MPI_SUM, WORLD, &all[2]);
	do {
		if (!done) {
			MPI_Testall(3, all, &done, MPI_STATUSES_IGNORE);
			took = MPI_Wtime() - start;
			rounds += !done;
		}
		double begun = MPI_Wtime();
		goes_on = near_round(neighbour, round++, !done);
		if (MPI_Wtime() - begun > near_longest)
			near_longest = MPI_Wtime() - begun;
	} while (goes_on);
	check(far_in, len, n, there);
	for (int i = 0; i < COUNT; i++)
		CHECK(b[i] == ranks * (i + n) + ranks * (ranks - 1) / 2);
	if (took > far_longest)
		far_longest = took;
	if (took > LONG) {
		waits++;
		lively += rounds > 2;
	}
}

static void collectives(long n)
{
	static int a[COUNT * 4], b[COUNT * 4];
	double start = MPI_Wtime();

	for (int i = 0; i < COUNT; i++)
		a[i] = rank + i + n;
	MPI_Allreduce(a, b, COUNT, MPI_INT, MPI_SUM, WORLD);
	for (int i = 0; i < COUNT; i++)
		CHECK(b[i] == ranks * (i + n) + ranks * (ranks - 1) / 2);
	for (int i = 0; i < COUNT; i++)
		a[i] = rank == n % ranks ? i + n : -1;
	MPI_Bcast(a, COUNT, MPI_INT, n % ranks, WORLD);
	for (int i = 0; i < COUNT; i++)
		CHECK(a[i] == i + n);
	for (int i = 0; i < COUNT * ranks; i++)
		a[i] = rank * 1000 + i / COUNT + n;
	MPI_Alltoall(a, COUNT, MPI_INT, b, COUNT, MPI_INT, WORLD);
	for (int i = 0; i < COUNT * ranks; i++)
		CHECK(b[i] == i / COUNT * 1000 + rank + n);
	MPI_Barrier(WORLD);
	double took = MPI_Wtime() - start;
	if (took > coll_longest)
		coll_longest = took;
}

/* The ranks of a host follow each other. */
static void check_hosts(void)
{
	char mine[MPI_MAX_PROCESSOR_NAME] = { 0 }, all[4][MPI_MAX_PROCESSOR_NAME];
	int len;

	CHECK(ranks == 4);
	MPI_Get_processor_name(mine, &len);
	MPI_Allgather(mine, sizeof(mine), MPI_CHAR, all, sizeof(mine), MPI_CHAR, WORLD);
	for (int r = 0; r < ranks; r++)
		CHECK((strcmp(all[r], mine) == 0) == (r / 2 == rank / 2));
}

int main(int argc, char **argv)
{
	int over = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(WORLD, &rank);
	MPI_Comm_size(WORLD, &ranks);
	CHECK(argc == 2);
	check_hosts();
	for (; !over; iterations++) {
		exchange((rank + 2) % ranks, rank ^ 1, iterations);
		if (iterations % 4 == 0)
			collectives(iterations);
		over = rank == 0 && access(argv[1], F_OK) == 0;
		MPI_Bcast(&over, 1, MPI_INT, 0, WORLD);
	}
	double took[3] = { far_longest, coll_longest, near_longest }, most[3];
	long counts[2] = { waits, lively }, all[2];
	MPI_Reduce(took, most, 3, MPI_DOUBLE, MPI_MAX, 0, WORLD);
	MPI_Reduce(counts, all, 2, MPI_LONG, MPI_SUM, 0, WORLD);
	if (rank == 0)
		printf("%ld iterations; longest: message %.0f ms, collectives %.0f ms, "
		       "round within a host %.0f ms\n"
		       "long waits: %ld, with more than two rounds: %ld\n"
		       "all %d ranks agree\n",
		       iterations, most[0] * 1e3, most[1] * 1e3, most[2] * 1e3, all[0], all[1], ranks);
	MPI_Finalize();
	return 0;
}
