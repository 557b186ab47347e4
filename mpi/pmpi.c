/*
 * Barewire's collectives under any MPI: a library of MPI's profiling interface, loaded before the
 * MPI's. It defines the MPI_* of nine collectives, blocking and not, makes what coll.h says is ours,
 * and calls PMPI_* for the rest. Compiled by the mpicc of the MPI that it is for.
 *
 * All ranks have it or none: members agree on a group by calls that who has not got it does not
 * make. Calls of MPI itself, which calls PMPI_*, are the MPI's.
 *
 * What belongs to a communicator is an attribute of it, which its copies do not get and which goes
 * with it.
 *
 * The request of a call that does not block is a generalized one. An MPI completes it when it is
 * told to, and asks nobody: so our progress is called from the MPI's own. Then a request progresses
 * in whatever call of MPI the program is, and waits for several requests are the MPI's. MPI's
 * standard has no place for that; MPICH has MPIX_Async_start since 4.3, and Open MPI
 * opal_progress_register. With an MPI that has neither, calls that do not block are its own.
 */
#define _GNU_SOURCE
#include "coll.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Who loads the library sees these; all else is hidden. */
#define VISIBLE __attribute__((visibility("default")))

/* What belongs to a communicator. */
struct ours {
	struct group group;
	/* MPI_COMM_NULL when it was freed. */
	MPI_Comm comm;
	/* The communicator and requests that are not over or not freed. */
	int holders;
	struct ours *next, **at;
};

/* A request of the MPI's, and the call that it is of. */
struct asked {
	struct request r;
	MPI_Request its;
	/* What the call ended with. */
	int err;
};

static pthread_once_t begun = PTHREAD_ONCE_INIT;
static int keyval = MPI_KEYVAL_INVALID;
static int verbose;
/* All that there are. Under the lock. */
static struct ours *all;
/*
 * A request that does not end: to ask after it is MPI's progress, without a message that could be
 * matched, and by any thread.
 */
static MPI_Request endless = MPI_REQUEST_NULL;
/* The MPI calls our progress from its own. Before that and after, requests are the MPI's. */
static bool progressed;

/*
 * What a request that a thread waits or tests for has ended with. An MPI takes the error of a
 * generalized request to a handler that is not its communicator's, so who waits is told by us.
 */
static __thread struct {
	/* Its wait or test is ours. */
	bool waits;
	int err;
	MPI_Comm comm;
} heard __attribute__((tls_model("initial-exec")));

/* Calls that barewire has made in this process. */
VISIBLE unsigned long barewire_mpi_calls(void);

unsigned long barewire_mpi_calls(void)
{
	return __atomic_load_n(&coll.calls, __ATOMIC_RELAXED);
}

/* ---- Types ---- */

/* MPI's types that have a name here: without gaps, and those that are reduced. */
static const struct named {
	MPI_Datatype mpi;
	unsigned char size;
	struct reduction_type reduced;
} NAMED[] = {
#define REDUCED(mpi, c, fi, kinds) { mpi, sizeof(c), { 1 + (fi), kinds } }
#define SIGNED(c) \
	(sizeof(c) == 1 ? FI_INT8 : sizeof(c) == 2 ? FI_INT16 : sizeof(c) == 4 ? FI_INT32 : FI_INT64)
#define UNSIGNED(c) \
	(sizeof(c) == 1 ? FI_UINT8 : sizeof(c) == 2 ? FI_UINT16 : sizeof(c) == 4 ? FI_UINT32 \
										 : FI_UINT64)
#define INTEGER(mpi, c) REDUCED(mpi, c, SIGNED(c), EVERY)
#define NATURAL(mpi, c) REDUCED(mpi, c, UNSIGNED(c), EVERY)
	REDUCED(MPI_DOUBLE, double, FI_DOUBLE, ARITHMETIC | ORDER),
	INTEGER(MPI_INT, int),
	REDUCED(MPI_BYTE, char, FI_UINT8, BITS),
	REDUCED(MPI_FLOAT, float, FI_FLOAT, ARITHMETIC | ORDER),
	INTEGER(MPI_LONG, long),
	NATURAL(MPI_UNSIGNED_LONG, unsigned long),
	NATURAL(MPI_UNSIGNED, unsigned),
	INTEGER(MPI_INT64_T, int64_t),
	NATURAL(MPI_UINT64_T, uint64_t),
	INTEGER(MPI_INT32_T, int32_t),
	NATURAL(MPI_UINT32_T, uint32_t),
	{ MPI_CHAR, 1, { 0, 0 } },
	INTEGER(MPI_LONG_LONG, long long),
	NATURAL(MPI_UNSIGNED_LONG_LONG, unsigned long long),
	INTEGER(MPI_SHORT, short),
	NATURAL(MPI_UNSIGNED_SHORT, unsigned short),
	INTEGER(MPI_SIGNED_CHAR, signed char),
	NATURAL(MPI_UNSIGNED_CHAR, unsigned char),
	INTEGER(MPI_INT8_T, int8_t),
	NATURAL(MPI_UINT8_T, uint8_t),
	INTEGER(MPI_INT16_T, int16_t),
	NATURAL(MPI_UINT16_T, uint16_t),
	REDUCED(MPI_AINT, MPI_Aint, SIGNED(MPI_Aint), ARITHMETIC | ORDER | BITS),
	REDUCED(MPI_OFFSET, MPI_Offset, SIGNED(MPI_Offset), ARITHMETIC | ORDER | BITS),
	REDUCED(MPI_COUNT, MPI_Count, SIGNED(MPI_Count), ARITHMETIC | ORDER | BITS),
	REDUCED(MPI_C_BOOL, _Bool, FI_UINT8, LOGIC),
	REDUCED(MPI_LONG_DOUBLE, long double, FI_LONG_DOUBLE, ARITHMETIC | ORDER),
	REDUCED(MPI_C_FLOAT_COMPLEX, float _Complex, FI_FLOAT_COMPLEX, ARITHMETIC),
	REDUCED(MPI_C_DOUBLE_COMPLEX, double _Complex, FI_DOUBLE_COMPLEX, ARITHMETIC),
	REDUCED(MPI_C_LONG_DOUBLE_COMPLEX, long double _Complex, FI_LONG_DOUBLE_COMPLEX, ARITHMETIC),
#ifdef MPIX_BFLOAT16
	/* Of MPICH. */
	REDUCED(MPIX_C_FLOAT16, uint16_t, FLOAT16, ARITHMETIC | ORDER),
	REDUCED(MPIX_BFLOAT16, uint16_t, BFLOAT16, ARITHMETIC | ORDER),
#endif
};

static const struct named *named(MPI_Datatype type)
{
	for (size_t n = 0; n < sizeof NAMED / sizeof *NAMED; n++)
		if (NAMED[n].mpi == type)
			return &NAMED[n];
	return NULL;
}

size_t face_size(MPI_Datatype type)
{
	const struct named *n = named(type);
	int size = 0;

	if (n)
		return n->size;
	/* The MPI says what is wrong with these. */
	if (type == MPI_DATATYPE_NULL || PMPI_Type_size(type, &size) != MPI_SUCCESS || size < 0)
		return SIZE_MAX;
	return size;
}

ptrdiff_t face_extent(MPI_Datatype type)
{
	const struct named *n = named(type);
	MPI_Aint lb, extent = 0;

	if (n)
		return n->size;
	PMPI_Type_get_extent(type, &lb, &extent);
	return extent;
}

/* MPI does not tell in which order the bytes of another type are, so it is packed. */
bool face_is_plain(MPI_Datatype type, size_t count, ptrdiff_t *before)
{
	(void) count;
	*before = 0;
	return named(type) != NULL;
}

struct reduction_type face_reduced(MPI_Datatype type)
{
	const struct named *n = named(type);
	struct reduction_type none = { 0, 0 };
	return n ? n->reduced : none;
}

/*
 * Packed bytes are those of the elements, in their order, without anything before or between: so
 * they are with Open MPI and MPICH where all processors are alike.
 */
void face_pack(const struct part *from, void *to)
{
	int at = 0;
	PMPI_Pack(from->buf, (int) from->count, from->type, to, (int) from->len, &at, MPI_COMM_SELF);
}

void face_unpack(const void *from, const struct part *to)
{
	int at = 0;
	PMPI_Unpack((void *) from, (int) to->len, &at, to->buf, (int) to->count, to->type,
		    MPI_COMM_SELF);
}

/* Its name may be freed, its copy is ours. Types of MPI's own are not freed. */
MPI_Datatype face_keep(MPI_Datatype type)
{
	MPI_Datatype copy;

	if (named(type))
		return type;
	return PMPI_Type_dup(type, &copy) == MPI_SUCCESS ? copy : MPI_DATATYPE_NULL;
}

void face_let_go(MPI_Datatype kept)
{
	if (!named(kept))
		PMPI_Type_free(&kept);
}

/* ---- What else coll.c asks for ---- */

void face_say(int level, const char *what)
{
	if (level <= verbose)
		fprintf(stderr, "barewire_mpi: %s\n", what);
}

void face_progress(void)
{
	int flag;

	if (endless != MPI_REQUEST_NULL)
		PMPI_Request_get_status(endless, &flag, MPI_STATUS_IGNORE);
}

int face_allgather(struct group *g, MPI_Comm comm, const void *one, void *all, int len)
{
	(void) g;
	return PMPI_Allgather(one, len, MPI_BYTE, all, len, MPI_BYTE, comm);
}

int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least)
{
	(void) g;
	return PMPI_Allreduce(one, least, 1, MPI_INT, MPI_MIN, comm);
}

/* ---- Requests ---- */

static struct asked *asked_of(struct request *r)
{
	return (struct asked *) ((char *) r - offsetof(struct asked, r));
}

static struct ours *ours_of(struct group *g)
{
	return (struct ours *) ((char *) g - offsetof(struct ours, group));
}

void face_hold(struct group *g)
{
	__atomic_fetch_add(&ours_of(g)->holders, 1, __ATOMIC_RELAXED);
}

void face_release(struct group *g)
{
	struct ours *o = ours_of(g);

	if (__atomic_sub_fetch(&o->holders, 1, __ATOMIC_ACQ_REL) > 0)
		return;
	coll_lock();
	if (o->at) {
		*o->at = o->next;
		if (o->next)
			o->next->at = o->at;
	}
	coll_unlock();
	/* Else MPI_Finalize has. */
	if (o->at)
		coll_forget(g);
	free(o);
}

void face_ended(struct request *r, int err)
{
	struct asked *a = asked_of(r);

	a->err = err;
	PMPI_Grequest_complete(a->its);
}

/* What the MPI asks of a request that has ended. */
static int query(void *extra, MPI_Status *status)
{
	struct asked *a = extra;

	PMPI_Status_set_elements(status, MPI_BYTE, 0);
	PMPI_Status_set_cancelled(status, 0);
	status->MPI_SOURCE = MPI_ANY_SOURCE;
	status->MPI_TAG = MPI_ANY_TAG;
	return heard.waits ? MPI_SUCCESS : a->err;
}

/* Nobody has the request any more. */
static int free_request(void *extra)
{
	struct asked *a = extra;
	struct group *g = a->r.group;

	if (a->err != MPI_SUCCESS && heard.waits && heard.err == MPI_SUCCESS) {
		heard.err = a->err;
		heard.comm = __atomic_load_n(&ours_of(g)->comm, __ATOMIC_RELAXED);
	}
	coll_put_back(&a->r);
	face_release(g);
	return MPI_SUCCESS;
}

/* MPI forbids it. */
static int cancel_request(void *extra, int complete)
{
	(void) extra;
	(void) complete;
	return MPI_ERR_REQUEST;
}

/* ---- Our progress in the MPI's ---- */

#if defined MPICH_NUMVERSION && MPICH_NUMVERSION >= 40300000 && defined MPIX_STREAM_NULL

static int poll_in_mpich(MPIX_Async_thing thing)
{
	(void) thing;
	if (!__atomic_load_n(&progressed, __ATOMIC_ACQUIRE))
		return MPIX_ASYNC_DONE;
	coll_progress();
	return MPIX_ASYNC_NOPROGRESS;
}

void face_opened(void)
{
	__atomic_store_n(&progressed, true, __ATOMIC_RELEASE);
	if (PMPIX_Async_start(poll_in_mpich, NULL, MPIX_STREAM_NULL) != MPI_SUCCESS)
		__atomic_store_n(&progressed, false, __ATOMIC_RELAXED);
}

static void face_closes(void)
{
	if (!__atomic_exchange_n(&progressed, false, __ATOMIC_ACQ_REL))
		return;
	/* A turn of the MPI's progress, which takes ours out. */
	face_progress();
}

/*
 * A turn of a wait or test for a request: MPI_Wait makes nothing else until the request is over.
 * Requests would do without, but MPI_Waitall of MPICH 5.0 aborts if a generalized one that has no
 * turns is not over and another one is MPI_REQUEST_NULL.
 */
static int turn(void *extra, MPI_Status *status)
{
	static __thread unsigned turns __attribute__((tls_model("initial-exec")));

	(void) extra;
	(void) status;
	coll_progress();
	if (++turns % POLLS == 0)
		face_progress();
	return MPI_SUCCESS;
}

static int turns_of_several(int count, void **extra, double timeout, MPI_Status *status)
{
	(void) count;
	(void) timeout;
	return turn(*extra, status);
}

static int start(struct asked *a)
{
	return PMPIX_Grequest_start(query, free_request, cancel_request, turn, turns_of_several, a,
				    &a->its);
}

#else

/* Open MPI's libopen-pal has had both of them since its first version. */
static int (*unregister)(int (*progress)(void));

void face_opened(void)
{
	int (*reg)(int (*progress)(void));

	*(void **) &reg = dlsym(RTLD_DEFAULT, "opal_progress_register");
	*(void **) &unregister = dlsym(RTLD_DEFAULT, "opal_progress_unregister");
	if (reg && unregister && reg(coll_progress) == 0)
		__atomic_store_n(&progressed, true, __ATOMIC_RELAXED);
}

static void face_closes(void)
{
	if (__atomic_exchange_n(&progressed, false, __ATOMIC_RELAXED))
		unregister(coll_progress);
}

static int start(struct asked *a)
{
	return PMPI_Grequest_start(query, free_request, cancel_request, a, &a->its);
}

#endif

/* ---- Calls that do not block ---- */

/* Begins a call with a request. Returns MPI_SUCCESS or an error of MPI's. */
static int begin_request(struct group *g, const struct plan *plan, MPI_Request *request)
{
	struct request *spare = coll_spare();
	struct asked *a = spare ? asked_of(spare) : malloc(sizeof *a);
	int err;

	if (!a)
		return MPI_ERR_NO_MEM;
	a->r.group = g;
	a->err = MPI_SUCCESS;
	err = start(a);
	if (err != MPI_SUCCESS) {
		coll_put_back(&a->r);
		return err;
	}
	face_hold(g);
	/* Before it can end. */
	*request = a->its;
	err = coll_begin(g, plan, &a->r);
	if (err != MPI_SUCCESS) {
		/* Whose end frees `a`. */
		PMPI_Grequest_complete(a->its);
		PMPI_Request_free(request);
	}
	return err;
}

/* ---- Communicators ---- */

static int free_ours(MPI_Comm comm, int key, void *value, void *extra)
{
	struct ours *o = value;

	(void) comm;
	(void) key;
	(void) extra;
	__atomic_store_n(&o->comm, MPI_COMM_NULL, __ATOMIC_RELAXED);
	face_release(&o->group);
	return MPI_SUCCESS;
}

/* How the request that does not end would be asked, freed, and cancelled. */
static int ask(void *extra, MPI_Status *status)
{
	(void) extra;
	PMPI_Status_set_elements(status, MPI_BYTE, 0);
	PMPI_Status_set_cancelled(status, 0);
	return MPI_SUCCESS;
}

static int ignore(void *extra)
{
	(void) extra;
	return MPI_SUCCESS;
}

static int ignore_cancel(void *extra, int complete)
{
	(void) extra;
	(void) complete;
	return MPI_SUCCESS;
}

static long setting(const char *name, long otherwise)
{
	const char *text = getenv(name);
	char *end;
	long value = text ? strtol(text, &end, 10) : otherwise;

	if (!text || (*text && !*end && value >= -1 && value <= INT32_MAX))
		return value;
	fprintf(stderr, "barewire_mpi: %s=%s is no number from -1 to 2147483647\n", name, text);
	return otherwise;
}

static void begin(void)
{
	int level = MPI_THREAD_SINGLE;

	verbose = (int) setting("BAREWIRE_MPI_VERBOSE", 0);
	/* As the component of Open MPI. */
	coll.max_bytes = (int) setting("BAREWIRE_MPI_MAX_BYTES", 512);
	PMPI_Query_thread(&level);
	coll.threads = level == MPI_THREAD_MULTIPLE;
	if (PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_ours, &keyval, NULL) != MPI_SUCCESS)
		keyval = MPI_KEYVAL_INVALID;
	if (PMPI_Grequest_start(ask, ignore, ignore_cancel, NULL, &endless) != MPI_SUCCESS)
		endless = MPI_REQUEST_NULL;
}

/* Whether MPI_Init was called and MPI_Finalize was not: MPI says what else is wrong. */
static bool in_time(void)
{
	int initialized = 0, finalized = 0;

	PMPI_Initialized(&initialized);
	PMPI_Finalized(&finalized);
	return initialized && !finalized;
}

/*
 * What belongs to a communicator, made at its first call. NULL if the call is the MPI's, or with
 * `err` set, since the others would wait for it.
 */
static struct group *of(MPI_Comm comm, int *err)
{
	int found = 0, inter = 1;
	struct ours *o;

	*err = MPI_SUCCESS;
	if (comm == MPI_COMM_NULL)
		return NULL;
	if (keyval == MPI_KEYVAL_INVALID) {
		if (!in_time())
			return NULL;
		pthread_once(&begun, begin);
		if (keyval == MPI_KEYVAL_INVALID)
			return NULL;
	}
	if (PMPI_Comm_get_attr(comm, keyval, &o, &found) != MPI_SUCCESS)
		return NULL;
	if (found)
		return &o->group;
	o = calloc(1, sizeof *o);
	if (o) {
		o->comm = comm;
		o->holders = 1;
	}
	*err = o ? PMPI_Comm_set_attr(comm, keyval, o) : MPI_ERR_NO_MEM;
	if (*err != MPI_SUCCESS) {
		free(o);
		return NULL;
	}
	PMPI_Comm_test_inter(comm, &inter);
	PMPI_Comm_rank(comm, &o->group.rank);
	PMPI_Comm_size(comm, &o->group.size);
	if (inter || o->group.size < 2)
		o->group.state = DECLINED;
	coll_lock();
	o->next = all;
	o->at = &all;
	if (all)
		all->at = &o->next;
	all = o;
	coll_unlock();
	return &o->group;
}

/*
 * Whether a call was made here, and what it returns. With a place for a request it only begins: who
 * has none waits.
 */
static bool made(MPI_Comm comm, const struct mpi_call *w, MPI_Request *request, int *err)
{
	struct group *g;
	struct plan plan;

	/* Nobody would make its progress. */
	if (request && !__atomic_load_n(&progressed, __ATOMIC_RELAXED))
		return false;
	g = of(comm, err);
	if (*err != MPI_SUCCESS) {
		PMPI_Comm_call_errhandler(comm, *err);
		return true;
	}
	if (!g || g->state == DECLINED || w->root < 0 || w->root >= g->size)
		return false;
	switch (coll_plan(g, comm, w, !request, &plan)) {
	case LEFT:
		return false;
	case EMPTY:
		/* The MPI has requests that are over. */
		*err = MPI_SUCCESS;
		return !request;
	case OURS:
		*err = request ? begin_request(g, &plan, request) : coll_run(g, &plan);
		break;
	case NO_MEMORY:
		*err = MPI_ERR_NO_MEM;
		break;
	}
	if (__builtin_expect(*err != MPI_SUCCESS, 0))
		PMPI_Comm_call_errhandler(comm, *err);
	return true;
}

/* ---- MPI's calls ---- */

VISIBLE int MPI_Barrier(MPI_Comm comm)
{
	const struct mpi_call w = { .kind = FI_BARRIER };
	int err;

	return made(comm, &w, NULL, &err) ? err : PMPI_Barrier(comm);
}

VISIBLE int MPI_Ibarrier(MPI_Comm comm, MPI_Request *request)
{
	const struct mpi_call w = { .kind = FI_BARRIER };
	int err;

	return made(comm, &w, request, &err) ? err : PMPI_Ibarrier(comm, request);
}

#define MPI(name) MPI_##name
#define PMPI(name) PMPI_##name
#define COUNT int
#include "pmpi_calls.h"

#if MPI_VERSION >= 4
#undef MPI
#undef PMPI
#undef COUNT
#define MPI(name) MPI_##name##_c
#define PMPI(name) PMPI_##name##_c
#define COUNT MPI_Count
#include "pmpi_calls.h"
#endif

/* ---- Waits and tests ---- */

/*
 * All of them are the MPI's; but one that ends a request of ours with an error tells the
 * communicator's handler of it, and returns it. One for several requests says so of itself and not
 * in their statuses, as MPI allows. Who calls PMPI_* gets the error by the MPI's own way.
 */
static int heard_of(int err)
{
	int ours = heard.err;

	heard.waits = false;
	if (__builtin_expect(ours == MPI_SUCCESS, 1))
		return err;
	heard.err = MPI_SUCCESS;
	PMPI_Comm_call_errhandler(heard.comm != MPI_COMM_NULL ? heard.comm : MPI_COMM_WORLD, ours);
	return ours;
}

#define WAIT(name, params, args) \
	VISIBLE int MPI_##name params \
	{ \
		heard.waits = true; \
		return heard_of(PMPI_##name args); \
	}

WAIT(Wait, (MPI_Request *request, MPI_Status *status), (request, status))
WAIT(Test, (MPI_Request *request, int *flag, MPI_Status *status), (request, flag, status))
WAIT(Waitall, (int count, MPI_Request *requests, MPI_Status *statuses), (count, requests, statuses))
WAIT(Testall, (int count, MPI_Request *requests, int *flag, MPI_Status *statuses),
     (count, requests, flag, statuses))
WAIT(Waitany, (int count, MPI_Request *requests, int *index, MPI_Status *status),
     (count, requests, index, status))
WAIT(Testany, (int count, MPI_Request *requests, int *index, int *flag, MPI_Status *status),
     (count, requests, index, flag, status))
WAIT(Waitsome, (int count, MPI_Request *requests, int *done, int *indices, MPI_Status *statuses),
     (count, requests, done, indices, statuses))
WAIT(Testsome, (int count, MPI_Request *requests, int *done, int *indices, MPI_Status *statuses),
     (count, requests, done, indices, statuses))
/* Who asks leaves the request, and is not told yet. */
WAIT(Request_get_status, (MPI_Request request, int *flag, MPI_Status *status),
     (request, flag, status))
#if MPI_VERSION > 4 || (MPI_VERSION == 4 && MPI_SUBVERSION >= 1)
WAIT(Request_get_status_all,
     (int count, const MPI_Request *requests, int *flag, MPI_Status *statuses),
     (count, requests, flag, statuses))
WAIT(Request_get_status_any,
     (int count, const MPI_Request *requests, int *index, int *flag, MPI_Status *status),
     (count, requests, index, flag, status))
WAIT(Request_get_status_some,
     (int count, const MPI_Request *requests, int *done, int *indices, MPI_Status *statuses),
     (count, requests, done, indices, statuses))
#endif

/* ---- The end ---- */

/*
 * Nobody leaves while another is still some calls behind, whom he may have to answer: so all meet
 * first, and barewire is closed last, when all that is the MPI's is gone.
 */
VISIBLE int MPI_Finalize(void)
{
	struct request *spare;
	char line[80];
	int err;

	if (!in_time())
		return PMPI_Finalize();
	/* A rank that made no call does not know whether another did. */
	PMPI_Barrier(MPI_COMM_WORLD);
	if (keyval == MPI_KEYVAL_INVALID)
		return PMPI_Finalize();
	face_closes();
	if (endless != MPI_REQUEST_NULL) {
		PMPI_Grequest_complete(endless);
		PMPI_Request_free(&endless);
	}
	snprintf(line, sizeof line, "%lu calls", barewire_mpi_calls());
	face_say(1, line);
	err = PMPI_Finalize();
	/*
	 * Communicators that were not freed, and whose attributes the MPI did not free: one of a session
	 * (MPI 4) may be freed later, and its record with it.
	 */
	while (all) {
		struct ours *o = all;

		all = o->next;
		o->at = NULL;
		coll_forget(&o->group);
	}
	coll_close();
	while ((spare = coll_spare()))
		free(asked_of(spare));
	keyval = MPI_KEYVAL_INVALID;
	return err;
}
