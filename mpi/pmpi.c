/*
 * Barewire's collectives under any MPI: a library of MPI's profiling interface, loaded before the
 * MPI's. It defines the MPI_* of nine collectives that block, makes what coll.h says is ours, and
 * calls PMPI_* for the rest. Compiled by the mpicc of the MPI that it is for.
 *
 * All ranks have it or none: members agree on a group by calls that who has not got it does not
 * make. Calls that do not block are the MPI's, and so are those of MPI itself, which calls PMPI_*.
 *
 * What belongs to a communicator is an attribute of it, which its copies do not get and which goes
 * with it.
 */
#include "coll.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Who loads the library sees these; all else is hidden. */
#define VISIBLE __attribute__((visibility("default")))

/* What belongs to a communicator. */
struct ours {
	struct group group;
	struct ours *next, **at;
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
	struct reduced reduced;
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

struct reduced face_reduced(MPI_Datatype type)
{
	const struct named *n = named(type);
	struct reduced none = { 0, 0 };
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

void face_opened(void)
{
}

/* ---- Communicators ---- */

static int free_ours(MPI_Comm comm, int key, void *value, void *extra)
{
	struct ours *o = value;

	(void) comm;
	(void) key;
	(void) extra;
	coll_lock();
	if (o->at) {
		*o->at = o->next;
		if (o->next)
			o->next->at = o->at;
	}
	coll_unlock();
	/* Else MPI_Finalize has. */
	if (o->at)
		coll_forget(&o->group);
	free(o);
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

/* Whether a call was made here, and what it returns. */
static bool made(MPI_Comm comm, const struct wanted *w, int *err)
{
	struct group *g = of(comm, err);
	struct plan plan;

	if (*err != MPI_SUCCESS) {
		PMPI_Comm_call_errhandler(comm, *err);
		return true;
	}
	if (!g || g->state == DECLINED || w->root < 0 || w->root >= g->size)
		return false;
	switch (coll_plan(g, comm, w, true, &plan)) {
	case LEFT:
		return false;
	case EMPTY:
		*err = MPI_SUCCESS;
		return true;
	case OURS:
		*err = coll_run(g, &plan);
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
	const struct wanted w = { .kind = FI_BARRIER };
	int err;

	return made(comm, &w, &err) ? err : PMPI_Barrier(comm);
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

/*
 * Nobody leaves while another is still some calls behind, whom he may have to answer: so all meet
 * first, and barewire is closed last, when all that is the MPI's is gone.
 */
VISIBLE int MPI_Finalize(void)
{
	char line[80];
	int err;

	if (!in_time())
		return PMPI_Finalize();
	/* A rank that made no call does not know whether another did. */
	PMPI_Barrier(MPI_COMM_WORLD);
	if (keyval == MPI_KEYVAL_INVALID)
		return PMPI_Finalize();
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
	keyval = MPI_KEYVAL_INVALID;
	return err;
}
