/* Ranks that compute or sleep for three times T_dead in the middle of eager messages, a rendezvous,
 * a window and collectives. Every byte is checked. Arguments: seconds to be away. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { EAGER = 64, EAGER_LEN = 200, LONG_LEN = 1 << 20 };

static int rank, ranks;

static void fail(const char *what)
{
	fprintf(stderr, "rank %d: %s\n", rank, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Makes no call of MPI for so long: half of the ranks sleep, the others keep a processor busy. */
static void be_away(double seconds)
{
	if (rank % 2) {
		usleep((useconds_t)(seconds * 1e6));
		return;
	}
	struct timespec now, start;
	volatile double x = 1;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		for (int i = 0; i < 100000; i++)
			x = x * 1.0000001 + 1e-9;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) * 1e-9 < seconds);
}

static void fill(unsigned char *to, int len, int seed)
{
	for (int i = 0; i < len; i++)
		to[i] = (unsigned char)(i * 7 + seed);
}

static void check(const unsigned char *got, int len, int seed, const char *what)
{
	for (int i = 0; i < len; i++)
		if (got[i] != (unsigned char)(i * 7 + seed))
			fail(what);
}

/* All others send to the one that is away: it finds everything when it is back. */
static void messages(int away, double seconds)
{
	static unsigned char one[EAGER_LEN], whole[LONG_LEN];
	if (rank != away) {
		for (int n = 0; n < EAGER; n++) {
			fill(one, EAGER_LEN, rank + n);
			MPI_Send(one, EAGER_LEN, MPI_BYTE, away, n, MPI_COMM_WORLD);
		}
		fill(whole, LONG_LEN, rank);
		MPI_Send(whole, LONG_LEN, MPI_BYTE, away, EAGER, MPI_COMM_WORLD);
		return;
	}
	be_away(seconds);
	for (int from = 0; from < ranks; from++) {
		if (from == away)
			continue;
		for (int n = 0; n < EAGER; n++) {
			MPI_Recv(one, EAGER_LEN, MPI_BYTE, from, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			check(one, EAGER_LEN, from + n, "an eager message");
		}
		MPI_Recv(whole, LONG_LEN, MPI_BYTE, from, EAGER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		check(whole, LONG_LEN, from, "a long message");
	}
}

/* One rank is away between its receives and their completion, and before a collective. */
static void posted_and_collective(int away, double seconds)
{
	static unsigned char to[LONG_LEN], from[LONG_LEN];
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
	MPI_Request both[2];
	fill(to, LONG_LEN, 3 * rank);
	MPI_Irecv(from, LONG_LEN, MPI_BYTE, before, 1, MPI_COMM_WORLD, &both[0]);
	MPI_Isend(to, LONG_LEN, MPI_BYTE, next, 1, MPI_COMM_WORLD, &both[1]);
	if (rank == away)
		be_away(seconds);
	MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
	check(from, LONG_LEN, 3 * before, "a long message to a posted receive");
	if (rank == away)
		be_away(seconds / 2);
	int sum = 0;
	MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (sum != ranks * (ranks - 1) / 2)
		fail("allreduce");
	if (rank == away)
		fill(to, LONG_LEN, 99);
	MPI_Bcast(to, LONG_LEN, MPI_BYTE, away, MPI_COMM_WORLD);
	check(to, LONG_LEN, 99, "bcast");
}

static void window(int away, double seconds)
{
	int *base;
	MPI_Win win;
	MPI_Win_allocate(ranks * sizeof(int), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &base, &win);
	memset(base, 0, ranks * sizeof(int));
	MPI_Win_fence(0, win);
	int value = rank + 1;
	for (int to = 0; to < ranks; to++)
		MPI_Put(&value, 1, MPI_INT, to, rank, 1, MPI_INT, win);
	if (rank == away)
		be_away(seconds);
	MPI_Win_fence(0, win);
	for (int i = 0; i < ranks; i++)
		if (base[i] != i + 1)
			fail("put");
	MPI_Win_free(&win);
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 3;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	for (int away = 0; away < 2; away++) {
		messages(away, seconds);
		posted_and_collective(away, seconds);
		window(away, seconds);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("all %d ranks are alive\n", ranks);
	MPI_Finalize();
	return 0;
}
