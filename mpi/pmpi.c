/*
 * Barewire's collectives for any MPI: a library of MPI's profiling interface, loaded before the MPI
 * library. It defines the MPI_* functions of nine collectives, blocking and nonblocking, executes
 * the calls that coll.h selects, and calls PMPI_* for all others. Compile it with the mpicc of the
 * MPI it is used with.
 *
 * Either all ranks load it or none: members agree on a group by calls that a rank without the
 * library does not make. Collectives inside the MPI library call PMPI_* and are not affected.
 *
 * The state of a communicator is an attribute of it, which duplicates do not inherit and which is
 * freed with it.
 *
 * The request of a nonblocking call is a generalized request. An MPI completes one only when it is
 * told to (MPI_Grequest_complete), so barewire's progress is called from the MPI's own. A request
 * then progresses in any MPI call, and the MPI itself waits for several requests. The MPI standard
 * has no interface for that; MPICH has MPIX_Async_start since 4.3, and Open MPI
 * opal_progress_register. With an MPI that has neither, nonblocking calls are the MPI's.
 */
#define _GNU_SOURCE
#include "coll.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exported functions; all other symbols are hidden. */
#define VISIBLE __attribute__((visibility("default")))

/* State of a communicator. */
struct comm_state {
	struct group group;
	/* MPI_COMM_NULL once it was freed. */
	MPI_Comm comm;
	/* References: of the communicator, and of requests that are not freed. */
	int holders;
	struct comm_state *next, **at;
};

/* A generalized request of the MPI, and its call. */
struct mpi_request {
	struct request r;
	MPI_Request handle;
	/* Result of the call. */
	int err;
};

static pthread_once_t begun = PTHREAD_ONCE_INIT;
static int keyval = MPI_KEYVAL_INVALID;
static int verbose;
/* List of all communicator states. Protected by coll_lock. */
static struct comm_state *all;
/*
 * A request that never completes. MPI_Request_get_status of it drives the MPI's progress from any
 * thread, and matches no message.
 */
static MPI_Request never_completed = MPI_REQUEST_NULL;
/* The MPI's progress calls coll_progress. Otherwise nonblocking calls are the MPI's. */
static bool progressed;

/*
 * First error of a request that this thread waits or tests for. An MPI reports the error of a
 * generalized request to an error handler other than the communicator's, so the functions below
 * report it themselves.
 */
static __thread struct {
	/* The thread is in one of the wait and test functions below. */
	bool waits;
	int err;
	MPI_Comm comm;
} waited __attribute__((tls_model("initial-exec")));

/* Number of collectives that barewire has executed in this process. */
VISIBLE unsigned long barewire_mpi_calls(void);

unsigned long barewire_mpi_calls(void)
{
	return __atomic_load_n(&coll.calls, __ATOMIC_RELAXED);
}

/* ---- Types ---- */

/* Predefined types without gaps, and their libfabric datatypes for reductions. */
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
	/* MPICH only. */
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
	/* The MPI reports the error of an invalid type. */
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

/* MPI does not expose the layout of other types, so they are packed. */
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
 * Packed data are the elements' bytes in order, without header or padding. This holds for Open MPI
 * and MPICH where all processors are alike.
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

/* The program may free its handle, so a duplicate is kept. Predefined types cannot be freed. */
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

/* ---- Other functions that coll.c calls ---- */

void face_say(int level, const char *what)
{
	if (level <= verbose)
		fprintf(stderr, "barewire_mpi: %s\n", what);
}

void face_progress(void)
{
	int flag;

	if (never_completed != MPI_REQUEST_NULL)
		PMPI_Request_get_status(never_completed, &flag, MPI_STATUS_IGNORE);
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

static struct mpi_request *mpi_request_of(struct request *r)
{
	return (struct mpi_request *) ((char *) r - offsetof(struct mpi_request, r));
}

static struct comm_state *comm_state_of(struct group *g)
{
	return (struct comm_state *) ((char *) g - offsetof(struct comm_state, group));
}

void face_hold(struct group *g)
{
	__atomic_fetch_add(&comm_state_of(g)->holders, 1, __ATOMIC_RELAXED);
}

void face_release(struct group *g)
{
	struct comm_state *o = comm_state_of(g);

	if (__atomic_sub_fetch(&o->holders, 1, __ATOMIC_ACQ_REL) > 0)
		return;
	coll_lock();
	if (o->at) {
		*o->at = o->next;
		if (o->next)
			o->next->at = o->at;
	}
	coll_unlock();
	/* Otherwise MPI_Finalize has called it. */
	if (o->at)
		coll_forget(g);
	free(o);
}

void face_ended(struct request *r, int err)
{
	struct mpi_request *a = mpi_request_of(r);

	a->err = err;
	PMPI_Grequest_complete(a->handle);
}

/* The query function of a completed request. */
static int query(void *extra, MPI_Status *status)
{
	struct mpi_request *a = extra;

	PMPI_Status_set_elements(status, MPI_BYTE, 0);
	PMPI_Status_set_cancelled(status, 0);
	status->MPI_SOURCE = MPI_ANY_SOURCE;
	status->MPI_TAG = MPI_ANY_TAG;
	return waited.waits ? MPI_SUCCESS : a->err;
}

/* The free function: the request was completed and freed. */
static int free_request(void *extra)
{
	struct mpi_request *a = extra;
	struct group *g = a->r.group;

	if (a->err != MPI_SUCCESS && waited.waits && waited.err == MPI_SUCCESS) {
		waited.err = a->err;
		waited.comm = __atomic_load_n(&comm_state_of(g)->comm, __ATOMIC_RELAXED);
	}
	coll_put_back(&a->r);
	face_release(g);
	return MPI_SUCCESS;
}

/* MPI forbids cancelling the request of a collective. */
static int cancel_request(void *extra, int complete)
{
	(void) extra;
	(void) complete;
	return MPI_ERR_REQUEST;
}

/* ---- Progress ---- */

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

static void stop_progress(void)
{
	if (!__atomic_exchange_n(&progressed, false, __ATOMIC_ACQ_REL))
		return;
	/* A call of the MPI's progress, which removes the hook. */
	face_progress();
}

/*
 * The poll function of a request: MPI_Wait calls nothing else until the request is complete. The
 * requests would complete without one, but MPI_Waitall of MPICH 5.0 aborts if a generalized request
 * without a poll function is incomplete and another one is MPI_REQUEST_NULL.
 */
static int poll_request(void *extra, MPI_Status *status)
{
	static __thread unsigned turns __attribute__((tls_model("initial-exec")));

	(void) extra;
	(void) status;
	coll_progress();
	if (++turns % POLLS == 0)
		face_progress();
	return MPI_SUCCESS;
}

static int poll_several(int count, void **extra, double timeout, MPI_Status *status)
{
	(void) count;
	(void) timeout;
	return poll_request(*extra, status);
}

static int start(struct mpi_request *a)
{
	return PMPIX_Grequest_start(query, free_request, cancel_request, poll_request, poll_several, a,
				    &a->handle);
}

#else

/* Open MPI's libopen-pal has had both functions since its first version. */
static int (*unregister)(int (*progress)(void));

void face_opened(void)
{
	int (*reg)(int (*progress)(void));

	*(void **) &reg = dlsym(RTLD_DEFAULT, "opal_progress_register");
	*(void **) &unregister = dlsym(RTLD_DEFAULT, "opal_progress_unregister");
	if (reg && unregister && reg(coll_progress) == 0)
		__atomic_store_n(&progressed, true, __ATOMIC_RELAXED);
}

static void stop_progress(void)
{
	if (__atomic_exchange_n(&progressed, false, __ATOMIC_RELAXED))
		unregister(coll_progress);
}

static int start(struct mpi_request *a)
{
	return PMPI_Grequest_start(query, free_request, cancel_request, a, &a->handle);
}

#endif

/* ---- Nonblocking calls ---- */

/* Begins a nonblocking call. Returns MPI_SUCCESS or an MPI error. */
static int begin_request(struct group *g, const struct plan *plan, MPI_Request *request)
{
	struct request *spare = coll_spare();
	struct mpi_request *a = spare ? mpi_request_of(spare) : malloc(sizeof *a);
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
	/* Set before the call can complete. */
	*request = a->handle;
	err = coll_begin(g, plan, &a->r);
	if (err != MPI_SUCCESS) {
		/* The free function frees `a`. */
		PMPI_Grequest_complete(a->handle);
		PMPI_Request_free(request);
	}
	return err;
}

/* ---- Communicators ---- */

static int free_comm_state(MPI_Comm comm, int key, void *value, void *extra)
{
	struct comm_state *o = value;

	(void) comm;
	(void) key;
	(void) extra;
	__atomic_store_n(&o->comm, MPI_COMM_NULL, __ATOMIC_RELAXED);
	face_release(&o->group);
	return MPI_SUCCESS;
}

/* The query, free and cancel functions of the request that never completes. */
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
	/* Default as in Open MPI's component. */
	coll.max_bytes = (int) setting("BAREWIRE_MPI_MAX_BYTES", 1 << 20);
	PMPI_Query_thread(&level);
	coll.threads = level == MPI_THREAD_MULTIPLE;
	if (PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_comm_state, &keyval, NULL)
	    != MPI_SUCCESS)
		keyval = MPI_KEYVAL_INVALID;
	if (PMPI_Grequest_start(ask, ignore, ignore_cancel, NULL, &never_completed) != MPI_SUCCESS)
		never_completed = MPI_REQUEST_NULL;
}

/* Whether MPI is initialized and not finalized. If not, the MPI reports the error. */
static bool is_initialized(void)
{
	int initialized = 0, finalized = 0;

	PMPI_Initialized(&initialized);
	PMPI_Finalized(&finalized);
	return initialized && !finalized;
}

/*
 * The group of a communicator, created at its first call. NULL if the call is the MPI's, or with
 * `err` set: the call has to fail, since the other members would wait for this one.
 */
static struct group *of(MPI_Comm comm, int *err)
{
	int found = 0, inter = 1;
	struct comm_state *o;

	*err = MPI_SUCCESS;
	if (comm == MPI_COMM_NULL)
		return NULL;
	if (keyval == MPI_KEYVAL_INVALID) {
		if (!is_initialized())
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
 * Whether a call was executed here, and its result in `err`. With a `request` it only begins, else
 * it blocks.
 */
static bool try_call(MPI_Comm comm, const struct mpi_call *w, MPI_Request *request, int *err)
{
	struct group *g;
	struct plan plan;

	/* Nothing would drive its progress. */
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
		/* For a nonblocking call the MPI returns a completed request. */
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

	return try_call(comm, &w, NULL, &err) ? err : PMPI_Barrier(comm);
}

VISIBLE int MPI_Ibarrier(MPI_Comm comm, MPI_Request *request)
{
	const struct mpi_call w = { .kind = FI_BARRIER };
	int err;

	return try_call(comm, &w, request, &err) ? err : PMPI_Ibarrier(comm, request);
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
 * All of them call the MPI's function. If that completed a request of barewire with an error, they
 * call the communicator's error handler and return the error. A function for several requests
 * returns it and does not set it in their statuses, as MPI allows. Callers of PMPI_* get the error
 * from the MPI.
 */
static int report_error(int err)
{
	int ours = waited.err;

	waited.waits = false;
	if (__builtin_expect(ours == MPI_SUCCESS, 1))
		return err;
	waited.err = MPI_SUCCESS;
	PMPI_Comm_call_errhandler(waited.comm != MPI_COMM_NULL ? waited.comm : MPI_COMM_WORLD, ours);
	return ours;
}

#define WAIT(name, params, args) \
	VISIBLE int MPI_##name params \
	{ \
		waited.waits = true; \
		return report_error(PMPI_##name args); \
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
/* These do not free the request, so its error is not waited yet. */
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

/* ---- MPI_Finalize ---- */

/*
 * A rank may have to answer members that are some calls behind, so all ranks meet in a barrier
 * first. barewire is closed last, after the MPI has freed its objects.
 */
VISIBLE int MPI_Finalize(void)
{
	struct request *spare;
	char line[80];
	int err;

	if (!is_initialized())
		return PMPI_Finalize();
	/* Also in a rank without collectives: another rank may have made some. */
	PMPI_Barrier(MPI_COMM_WORLD);
	if (keyval == MPI_KEYVAL_INVALID)
		return PMPI_Finalize();
	stop_progress();
	if (never_completed != MPI_REQUEST_NULL) {
		PMPI_Grequest_complete(never_completed);
		PMPI_Request_free(&never_completed);
	}
	snprintf(line, sizeof line, "%lu calls", barewire_mpi_calls());
	face_say(1, line);
	err = PMPI_Finalize();
	/*
	 * States of communicators that were not freed, and whose attributes the MPI did not delete. A
	 * communicator of a session (MPI 4) may be freed later, and its state with it.
	 */
	while (all) {
		struct comm_state *o = all;

		all = o->next;
		o->at = NULL;
		coll_forget(&o->group);
	}
	coll_close();
	while ((spare = coll_spare()))
		free(mpi_request_of(spare));
	keyval = MPI_KEYVAL_INVALID;
	return err;
}
