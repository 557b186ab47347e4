/* Ranks that make no call of MPI for a while, in the middle of eager messages, a rendezvous, windows,
 * atomic operations and collectives. Every byte is checked.
 *
 *     computes each SECONDS    away in the middle of one kind after the other, two ranks by turns
 *     computes all SECONDS     away once in the middle of all kinds, two ranks by turns
 *     computes traffic SECONDS all kinds again and again for so long; each rank says its pid
 *     computes killed SECONDS DIR  rank 0 computes for ever, rank 1 kills it, and each of the others has
 *                              to be told within so long and two gaps between its polls
 */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EAGER = 64, EAGER_LEN = 200, LONG_LEN = 1 << 20 };

static int rank, ranks, next, before;
static unsigned char one[EAGER_LEN], to[LONG_LEN], from[LONG_LEN], root[LONG_LEN];

/* Of each rank: what rank i has put (at i), a sum, a count, a constant. */
static long *shared;
static MPI_Win win;

static void fail(const char *what)
{
	fprintf(stderr, "rank %d: %s\n", rank, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Makes no call of MPI for so long: half of the ranks sleep, the others keep a processor busy. */
static void be_away(double seconds)
{
	double start = MPI_Wtime();
	volatile double x = 1;
	if (rank % 2) {
		usleep((useconds_t)(seconds * 1e6));
		return;
	}
	while (MPI_Wtime() - start < seconds)
		for (int i = 0; i < 100000; i++)
			x = x * 1.0000001 + 1e-9;
}

static void fill(unsigned char *buf, int len, int seed)
{
	for (int i = 0; i < len; i++)
		buf[i] = (unsigned char)(i * 7 + seed);
}

static void check(const unsigned char *got, int len, int seed, const char *what)
{
	for (int i = 0; i < len; i++)
		if (got[i] != (unsigned char)(i * 7 + seed))
			fail(what);
}

static void send_eager(int target)
{
	for (int n = 0; n < EAGER; n++) {
		fill(one, EAGER_LEN, rank + n);
		MPI_Send(one, EAGER_LEN, MPI_BYTE, target, n, MPI_COMM_WORLD);
	}
}

static void receive_eager(void)
{
	for (int source = 0; source < ranks; source++)
		for (int n = 0; source != rank && n < EAGER; n++) {
			MPI_Recv(one, EAGER_LEN, MPI_BYTE, source, n, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			check(one, EAGER_LEN, source + n, "an eager message");
		}
}

/* All others send to the one that is away: it finds everything when it is back. */
static void messages(int away, double seconds)
{
	if (rank != away) {
		send_eager(away);
		fill(to, LONG_LEN, rank);
		MPI_Send(to, LONG_LEN, MPI_BYTE, away, EAGER, MPI_COMM_WORLD);
		return;
	}
	be_away(seconds);
	receive_eager();
	for (int source = 0; source < ranks; source++) {
		if (source == rank)
			continue;
		MPI_Recv(from, LONG_LEN, MPI_BYTE, source, EAGER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		check(from, LONG_LEN, source, "a long message");
	}
}

static void start_ring(MPI_Request both[2])
{
	fill(to, LONG_LEN, 3 * rank);
	MPI_Irecv(from, LONG_LEN, MPI_BYTE, before, 1000, MPI_COMM_WORLD, &both[0]);
	MPI_Isend(to, LONG_LEN, MPI_BYTE, next, 1000, MPI_COMM_WORLD, &both[1]);
}

/* One rank is away between its receives and their completion. */
static void posted(int away, double seconds)
{
	MPI_Request both[2];
	start_ring(both);
	if (rank == away)
		be_away(seconds);
	MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
	check(from, LONG_LEN, 3 * before, "a long message to a posted receive");
}

/* One rank comes late to a collective. */
static void collectives(int away, double seconds)
{
	int sum = 0;
	if (rank == away)
		be_away(seconds);
	MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (sum != ranks * (ranks - 1) / 2)
		fail("allreduce");
	if (rank == away)
		fill(root, LONG_LEN, 99);
	MPI_Bcast(root, LONG_LEN, MPI_BYTE, away, MPI_COMM_WORLD);
	check(root, LONG_LEN, 99, "bcast");
}

static void make_window(void)
{
	MPI_Aint len = (ranks + 3) * sizeof *shared;
	MPI_Win_allocate(len, sizeof *shared, MPI_INFO_NULL, MPI_COMM_WORLD, &shared, &win);
}

static void clear_window(void)
{
	MPI_Win_fence(0, win);
	memset(shared, 0, (ranks + 2) * sizeof *shared);
	shared[ranks + 2] = 1000 + rank;
	MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
}

/* Between two fences. */
static void window(int away, double seconds)
{
	long value = rank + 1;
	clear_window();
	MPI_Win_fence(0, win);
	for (int target = 0; target < ranks; target++)
		MPI_Put(&value, 1, MPI_LONG, target, rank, 1, MPI_LONG, win);
	if (rank == away)
		be_away(seconds);
	MPI_Win_fence(0, win);
	for (int i = 0; i < ranks; i++)
		if (shared[i] != i + 1)
			fail("put");
	MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
}

/* What passive operations bring. */
struct brought {
	long mine, counts[8], constants[8];
};

/* Needs no call of a target: a put, a sum, a count and a get at each rank. */
static void start_passive(struct brought *b)
{
	static const long step = 1;
	b->mine = rank + 1;
	MPI_Win_lock_all(0, win);
	for (int t = 0; t < ranks; t++) {
		MPI_Put(&b->mine, 1, MPI_LONG, t, rank, 1, MPI_LONG, win);
		MPI_Accumulate(&b->mine, 1, MPI_LONG, t, ranks, 1, MPI_LONG, MPI_SUM, win);
		MPI_Fetch_and_op(&step, &b->counts[t], MPI_LONG, t, ranks + 1, MPI_SUM, win);
		MPI_Get(&b->constants[t], 1, MPI_LONG, t, ranks + 2, 1, MPI_LONG, win);
	}
}

static void end_passive(const struct brought *b)
{
	MPI_Win_unlock_all(win);
	MPI_Barrier(MPI_COMM_WORLD);
	for (int t = 0; t < ranks; t++)
		if (b->counts[t] < 0 || b->counts[t] >= ranks || b->constants[t] != 1000 + t)
			fail("fetch-and-op or get");
	MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, win);
	for (int i = 0; i < ranks; i++)
		if (shared[i] != i + 1)
			fail("put");
	if (shared[ranks] != ranks * (ranks + 1) / 2 || shared[ranks + 1] != ranks)
		fail("accumulate");
	MPI_Win_unlock(rank, win);
	MPI_Barrier(MPI_COMM_WORLD);
}

static void atomics(int away, double seconds)
{
	struct brought b;
	clear_window();
	start_passive(&b);
	if (rank == away)
		be_away(seconds);
	end_passive(&b);
}

/* One rank is away while something of each kind is on its way. Nobody is if `away` is -1. */
static void everything(int away, double seconds)
{
	int sum = 0, late = away < 0 ? 0 : away;
	struct brought b;
	MPI_Request both[2], coll[2];
	clear_window();
	start_ring(both);
	if (rank != late)
		send_eager(late);
	MPI_Iallreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &coll[0]);
	if (rank == late)
		fill(root, LONG_LEN, 99);
	MPI_Ibcast(root, LONG_LEN, MPI_BYTE, late, MPI_COMM_WORLD, &coll[1]);
	start_passive(&b);
	if (rank == away)
		be_away(seconds);
	if (rank == late)
		receive_eager();
	MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
	check(from, LONG_LEN, 3 * before, "a long message to a posted receive");
	MPI_Waitall(2, coll, MPI_STATUSES_IGNORE);
	if (sum != ranks * (ranks - 1) / 2)
		fail("iallreduce");
	check(root, LONG_LEN, 99, "ibcast");
	end_passive(&b);
}

static void traffic(double seconds)
{
	double start = MPI_Wtime();
	int rounds = 0, go = 1;
	printf("pid %d\n", (int)getpid());
	fflush(stdout);
	for (; go; rounds++) {
		everything(-1, 0);
		go = MPI_Wtime() - start < seconds;
		MPI_Bcast(&go, 1, MPI_INT, 0, MPI_COMM_WORLD);
	}
	if (rank == 0)
		printf("%d rounds\n", rounds);
}

/* When the one that was killed had ended, how long the others may wait, and the longest gap between
 * two of their polls. */
static double ended, bound, gap;
static int told, victim;

/* Where the verdicts go: the launcher may end with the first. */
static const char *dir;

/* Some MPIs end the program themselves. */
static void say(void)
{
	char name[2][300];
	double now = MPI_Wtime();
	/* It may be told before its parent has seen it. */
	while (ended == 0 && MPI_Wtime() - now < 1)
		if (kill(victim, 0))
			ended = now;
	double s = now - ended, most = bound + 2 * gap;
	int right = told && ended > 0 && s < most;
	snprintf(name[0], sizeof name[0], "%s/rank%d.part", dir, rank);
	snprintf(name[1], sizeof name[1], "%s/rank%d", dir, rank);
	FILE *file = fopen(name[0], "w");
	if (file) {
		fprintf(file, "rank %d: told after %.0f of %.0f ms, %s\n", rank, s * 1e3, most * 1e3,
			right ? "in time" : "WRONG");
		fclose(file);
		rename(name[0], name[1]);
	}
	/* MPI promises nothing any more. */
	_exit(0);
}

/* The others wait for the one that computes and then is killed. What they are told of is a send that
 * it has to take. */
static void killed(void)
{
	int done = 0, error = MPI_SUCCESS;
	double start = MPI_Wtime(), last = start;
	MPI_Request send;
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	victim = (int)getpid();
	MPI_Bcast(&victim, 1, MPI_INT, 0, MPI_COMM_WORLD);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0) {
		be_away(90);
		_exit(1);
	}
	fill(to, LONG_LEN, rank);
	MPI_Isend(to, LONG_LEN, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &send);
	atexit(say);
	while (!done && error == MPI_SUCCESS && last - start < 60) {
		/* One polls without a pause, the others do until it happens, and then seldom. */
		if (rank > 1 && last - start > 0.25)
			usleep(50000);
		/* If it ends the program. */
		told = 1;
		error = MPI_Test(&send, &done, MPI_STATUS_IGNORE);
		double now = MPI_Wtime();
		if (rank == 1 && ended == 0 && now - start > 0.3)
			kill(victim, SIGKILL);
		if (ended == 0 && kill(victim, 0))
			ended = now;
		gap = now - last > gap ? now - last : gap;
		last = now;
	}
	told = error != MPI_SUCCESS;
	exit(0);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "each";
	double seconds = argc > 2 ? atof(argv[2]) : 3;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks < 2 || ranks > 8)
		fail("2 to 8 ranks");
	bound = seconds;
	dir = argc > 3 ? argv[3] : ".";
	next = (rank + 1) % ranks;
	before = (rank + ranks - 1) % ranks;
	if (!strcmp(mode, "killed"))
		killed();
	make_window();
	for (int away = 0; away < 2 && !strcmp(mode, "all"); away++)
		everything(away, seconds);
	for (int away = 0; away < 2 && !strcmp(mode, "each"); away++) {
		messages(away, seconds);
		posted(away, seconds);
		collectives(away, seconds);
		window(away, seconds);
		atomics(away, seconds);
	}
	if (!strcmp(mode, "traffic"))
		traffic(seconds);
	MPI_Win_free(&win);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("all %d ranks are alive\n", ranks);
	MPI_Finalize();
	return 0;
}
