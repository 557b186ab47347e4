/*
 * Requests of collectives that what is in mpi/ makes, among those of the MPI: every form of wait and
 * test, several under way on communicators that come and go, waited for in any order, and progress
 * while the program is elsewhere.
 *
 * Arguments: "all" or "threads"; a file that there is not, beside which ranks of one machine put
 * files to tell each other something without MPI, or "hosts"; and "auto" if barewire has a progress
 * thread.
 * Blocks of up to 1 MiB have to be barewire's.
 */
#define _GNU_SOURCE
#include "made.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LONGEST (1 << 17)
#define KINDS 9
#define SOME 27

static int rank, size, wrong;
static MPI_Comm comm;

static void check(int good, const char *what, const char *how)
{
	if (good)
		return;
	__atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
	printf("BAD rank %d of %d: %s: %s\n", rank, size, what, how);
}

/* ---- Calls whose results are told apart ---- */

/* One call of any kind: longs, `count` of a block. */
struct call {
	int kind, n, count, root;
	long *in, *out;
};

static long value(const struct call *c, int from, int to, int i)
{
	return c->n * 1000003l + from * 1009 + to * 31 + i;
}

static void begin(struct call *c, int kind, int n, int count, MPI_Comm on, MPI_Request *request)
{
	int all = count * size;
	MPI_Datatype t = MPI_LONG;

	*c = (struct call) { kind, n, count, n % size, calloc(all, sizeof(long)),
			     malloc(all * sizeof(long)) };
	memset(c->out, 0x55, all * sizeof(long));
	for (int i = 0; i < all; i++)
		c->in[i] = value(c, rank, i / count, i % count);
	if (kind == 1 && rank == c->root)
		memcpy(c->out, c->in, count * sizeof(long));
	switch (kind) {
	case 0: MPI_Ibarrier(on, request); return;
	case 1: MPI_Ibcast(c->out, count, t, c->root, on, request); return;
	case 2: MPI_Iallreduce(c->in, c->out, count, t, MPI_SUM, on, request); return;
	case 3: MPI_Ireduce(c->in, c->out, count, t, MPI_MAX, c->root, on, request); return;
	case 4: MPI_Ireduce_scatter_block(c->in, c->out, count, t, MPI_SUM, on, request); return;
	case 5: MPI_Iallgather(c->in, count, t, c->out, count, t, on, request); return;
	case 6: MPI_Ialltoall(c->in, count, t, c->out, count, t, on, request); return;
	case 7: MPI_Igather(c->in, count, t, c->out, count, t, c->root, on, request); return;
	case 8: MPI_Iscatter(c->in, count, t, c->out, count, t, c->root, on, request); return;
	}
}

/* What stands at `i` of the result. */
static long expected(const struct call *c, int i)
{
	long sum = 0, to = c->kind == 4 ? rank : 0;
	int at = i % c->count;

	switch (c->kind) {
	case 1: return value(c, c->root, 0, i);
	case 3: return value(c, size - 1, 0, i);
	case 5: case 7: return value(c, i / c->count, 0, at);
	case 6: return value(c, i / c->count, rank, at);
	case 8: return value(c, c->root, rank, i);
	}
	for (int r = 0; r < size; r++)
		sum += value(c, r, to, at);
	return sum;
}

static const char *const NAMES[KINDS] = { "Ibarrier", "Ibcast", "Iallreduce", "Ireduce",
					  "Ireduce_scatter_block", "Iallgather", "Ialltoall",
					  "Igather", "Iscatter" };

/* Looks at the result of a call that is over. */
static void end(struct call *c, const char *how)
{
	int all = c->kind >= 5 && c->kind <= 7, len = all ? c->count * size : c->count;
	int rooted = c->kind == 3 || c->kind == 7;

	for (int i = 0; c->kind && (!rooted || rank == c->root) && i < len; i++)
		if (c->out[i] != expected(c, i)) {
			check(0, NAMES[c->kind], how);
			break;
		}
	free(c->in);
	free(c->out);
}

/* ---- Every form of wait and test ---- */

enum form { WAIT, TEST, WAITALL, TESTALL, WAITANY, TESTANY, WAITSOME, TESTSOME, STATUS, FORMS };
static const char *const FORM[FORMS] = { "Wait", "Test", "Waitall", "Testall", "Waitany", "Testany",
					 "Waitsome", "Testsome", "Request_get_status" };

/* The status of what was received is its own, that of a collective is empty. */
static void told(const MPI_Status *s, int which, enum form form)
{
	int count = -1, cancelled = 1;

	MPI_Get_count(s, MPI_BYTE, &count);
	MPI_Test_cancelled(s, &cancelled);
	check(!cancelled, "a status says cancelled", FORM[form]);
	if (which == 1)
		check(s->MPI_TAG == 5 && count == LONGEST, "a message's status", FORM[form]);
	else if (which != 2 && !LEFT_REQUESTS)
		check(count == 0, "a collective's status", FORM[form]);
}

/* Waits until all are over: of five requests four, and the second and third are messages. */
static void await(enum form form, int count, MPI_Request *requests)
{
	MPI_Status s[5];
	int at[5], done, left = 4, flag = 0;

	for (int i = 0; form == STATUS && i < count; i++, flag = 0) {
		while (!flag)
			MPI_Request_get_status(requests[i], &flag, &s[i]);
		check(requests[i] != MPI_REQUEST_NULL || i == 3, "a request is kept", FORM[form]);
	}
	if (form == WAIT || form == STATUS)
		for (int i = 0; i < count; i++)
			MPI_Wait(&requests[i], &s[i]);
	for (int i = 0; form == TEST && i < count; i++, flag = 0)
		while (!flag)
			MPI_Test(&requests[i], &flag, &s[i]);
	if (form == WAITALL)
		MPI_Waitall(count, requests, s);
	while (form == TESTALL && !flag)
		MPI_Testall(count, requests, &flag, s);
	while ((form == WAITANY || form == TESTANY) && left > 0) {
		flag = 1;
		if (form == WAITANY)
			MPI_Waitany(count, requests, &at[0], &s[4]);
		else
			MPI_Testany(count, requests, &at[0], &flag, &s[4]);
		if (flag)
			told(&s[4], at[0], form);
		left -= flag;
	}
	while ((form == WAITSOME || form == TESTSOME) && left > 0) {
		if (form == WAITSOME)
			MPI_Waitsome(count, requests, &done, at, s);
		else
			MPI_Testsome(count, requests, &done, at, s);
		for (int i = 0; i < done; i++)
			told(&s[i], at[i], form);
		left -= done;
	}
	for (int i = 0; left == 4 && i < count; i++)
		told(&s[i], i, form);
	for (int i = 0; i < count; i++)
		check(requests[i] == MPI_REQUEST_NULL, "a request is left", FORM[form]);
}

/* A collective, a message to and from a neighbour, none, and another collective. */
static void forms(MPI_Comm on, int n)
{
	static char sent[LONGEST], received[LONGEST];
	struct call first, second;

	for (enum form form = 0; form < FORMS; form++, n++) {
		MPI_Request requests[5];
		begin(&first, n % KINDS, n, 1 + n % 40, on, &requests[0]);
		MPI_Irecv(received, LONGEST, MPI_BYTE, (rank + 1) % size, 5, on, &requests[1]);
		requests[3] = MPI_REQUEST_NULL;
		MPI_Isend(sent, LONGEST, MPI_BYTE, (rank + size - 1) % size, 5, on, &requests[2]);
		begin(&second, (n + 4) % KINDS, n, n % 5 ? 3 : 3000, on, &requests[4]);
		await(form, 5, requests);
		end(&first, FORM[form]);
		end(&second, FORM[form]);
	}
}

/* ---- Many under way ---- */

/* Calls of all kinds on two communicators, ended by each rank in an order of its own. */
static void mixed(MPI_Comm a, MPI_Comm b, int n)
{
	struct call calls[SOME];
	MPI_Request requests[SOME];
	long sum = 0, one = 1;

	for (int i = 0; i < SOME; i++)
		begin(&calls[i], (i + n) % KINDS, n + i, i % 7 ? 1 + i : 2500, i % 3 ? a : b,
		      &requests[i]);
	/* Behind all of them, and it blocks. */
	MPI_Allreduce(&one, &sum, 1, MPI_LONG, MPI_SUM, a);
	check(sum == size, "a call behind requests", "wrong");
	/* 27 and 2, 5, 8 ... have no common divisor. */
	for (int i = 0; i < SOME; i++) {
		int at = (i * (3 * (rank % 5) + 2) + rank) % SOME;
		MPI_Wait(&requests[at], MPI_STATUS_IGNORE);
		end(&calls[at], "in any order");
	}
}

/* The communicator is freed before anything is over. */
static void freed(int n)
{
	struct call calls[KINDS];
	MPI_Request requests[KINDS];
	MPI_Comm c;

	MPI_Comm_dup(comm, &c);
	MPI_Barrier(c);
	if (rank == n % size)
		usleep(2000);
	for (int kind = 0; kind < KINDS; kind++)
		begin(&calls[kind], kind, n + kind, 20, c, &requests[kind]);
	MPI_Comm_free(&c);
	MPI_Waitall(KINDS, requests, MPI_STATUSES_IGNORE);
	for (int kind = 0; kind < KINDS; kind++)
		end(&calls[kind], "without its communicator");
}

/* The type of a result with gaps is freed before it comes, and another has its place. */
static void typeless(int n)
{
	int from[8], to[8];
	MPI_Datatype pairs, other;
	MPI_Request request;

	if (rank == n % size)
		usleep(1000);
	for (int i = 0; i < 8; i++) {
		from[i] = n + i;
		to[i] = rank == n % size ? from[i] : -1;
	}
	MPI_Type_vector(4, 1, 2, MPI_INT, &pairs);
	MPI_Type_commit(&pairs);
	MPI_Ibcast(to, 1, pairs, n % size, comm, &request);
	MPI_Type_free(&pairs);
	MPI_Type_vector(1, 3, 3, MPI_INT, &other);
	MPI_Type_commit(&other);
	MPI_Wait(&request, MPI_STATUS_IGNORE);
	for (int i = 0; i < 8; i++)
		check(to[i] == (i % 2 && rank != n % size ? -1 : from[i]), "MPI_Ibcast",
		      "whose type is freed");
	MPI_Type_free(&other);
}

/* ---- Elsewhere ---- */

/* What one rank waits for in other calls of MPI, the others send when theirs is over. */
static void elsewhere(int count, int late)
{
	for (int kind = 0; kind < KINDS; kind++) {
		struct call c;
		MPI_Request request;
		char nothing = 0;
		begin(&c, kind, kind, count, comm, &request);
		if (rank == late) {
			MPI_Status s;
			for (int r = 1; r < size; r++) {
				MPI_Probe(MPI_ANY_SOURCE, 6, comm, &s);
				MPI_Recv(&nothing, 1, MPI_BYTE, s.MPI_SOURCE, 6, comm, &s);
			}
		}
		MPI_Wait(&request, MPI_STATUS_IGNORE);
		if (rank != late)
			MPI_Send(&nothing, 1, MPI_BYTE, late, 6, comm);
		end(&c, "while one is elsewhere");
	}
}

static const char *beside;

static void file_of(char *name, int r, int n)
{
	snprintf(name, 300, "%.250s.%d.%d", beside, r, n);
}

/*
 * One rank computes after its call and makes none of MPI until the others say, without MPI, that
 * theirs is over. Then a single test says that its own is, unless barewire's thread is about it.
 */
static void computes(int count, int n, int automatic)
{
	struct call c;
	MPI_Request request;
	char name[300];
	int flag = 0, patience = 20000;

	MPI_Barrier(comm);
	begin(&c, n % KINDS, n, count, comm, &request);
	if (rank) {
		MPI_Wait(&request, MPI_STATUS_IGNORE);
		file_of(name, rank, n);
		close(open(name, O_CREAT | O_WRONLY, 0600));
	} else {
		for (int r = 1; r < size; r++) {
			file_of(name, r, n);
			while (access(name, F_OK) && patience-- > 0)
				usleep(1000);
			unlink(name);
		}
		check(patience > 0, NAMES[n % KINDS], "does not go on while the program computes");
		MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
		check(flag || automatic, NAMES[n % KINDS], "is not over at the first test");
		MPI_Wait(&request, MPI_STATUS_IGNORE);
	}
	end(&c, "while one computes");
}

/* MPI forbids it, and the call goes on. */
static void cancelled(void)
{
	struct call c;
	MPI_Request request;

	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
	begin(&c, 2, 7, 1, comm, &request);
	check(MPI_Cancel(&request) != MPI_SUCCESS, "MPI_Cancel", "of a collective");
	MPI_Wait(&request, MPI_STATUS_IGNORE);
	end(&c, "after MPI_Cancel");
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
	MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_ARE_FATAL);
}

/* ---- Threads ---- */

static void *own(void *at)
{
	MPI_Comm *c = at;
	for (int n = 0; n < 10; n++) {
		forms(c[0], n * FORMS);
		mixed(c[0], c[1], n * SOME);
	}
	return NULL;
}

static void threads(void)
{
	pthread_t thread[3];
	MPI_Comm c[6];

	for (int i = 0; i < 6; i++) {
		MPI_Comm_dup(comm, &c[i]);
		MPI_Barrier(c[i]);
	}
	for (int t = 0; t < 3; t++)
		pthread_create(&thread[t], NULL, own, &c[2 * t]);
	for (int t = 0; t < 3; t++)
		pthread_join(thread[t], NULL);
	for (int i = 0; i < 6; i++)
		MPI_Comm_free(&c[i]);
}

static void all(int automatic, int one_machine)
{
	MPI_Comm other;

	MPI_Barrier(comm);
	MPI_Comm_dup(comm, &other);
	MPI_Barrier(other);
	for (int n = 0; n < KINDS; n++)
		forms(comm, n);
	for (int n = 0; n < 30; n++) {
		mixed(comm, other, n);
		freed(n);
		typeless(n);
	}
	MPI_Comm_free(&other);
	for (int late = 0; late < size; late++) {
		elsewhere(1, late);
		elsewhere(20000, late);
	}
	for (int n = 0; n < KINDS && size == 2 && !LEFT_REQUESTS && one_machine; n++) {
		computes(1, n, automatic);
		if (automatic)
			computes(20000, n + KINDS, 1);
	}
	cancelled();
}

int main(int argc, char **argv)
{
	int many = argc > 1 && !strcmp(argv[1], "threads"), provided, all_wrong = 0;

	MPI_Init_thread(&argc, &argv, many ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
	comm = MPI_COMM_WORLD;
	MPI_Comm_rank(comm, &rank);
	MPI_Comm_size(comm, &size);
	beside = argc > 2 ? argv[2] : "told";
	find_counter();
	many ? threads() : all(argc > 3, strcmp(beside, "hosts"));
	check(LEFT_REQUESTS || made() > 500, "requests", "are others'");
	MPI_Reduce(&wrong, &all_wrong, 1, MPI_INT, MPI_SUM, 0, comm);
	if (rank == 0 && all_wrong == 0)
		printf("all %d ranks agree, %lu calls\n", size, made());
	MPI_Finalize();
	return wrong != 0;
}
