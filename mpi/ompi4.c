/*
 * Barewire's collectives under Open MPI 4.1: a component (`coll`), found in a directory of
 * `mca_base_component_path`. What it takes, and how, is in coll.h; what it does not take is made by
 * the components below, the *fallback*.
 *
 * A call that does not block is the same with a request. To agree on a group takes waiting, so it
 * is the fallback's until a call that blocks has made the group.
 *
 * While a call waits it makes Open MPI's progress, so that everything else goes on; and our own is
 * among what Open MPI progresses, so that requests end and members that forward are not waited for.
 */
#include "ompi_config.h"

#include <stdlib.h>
#include <string.h>

#include "coll.h"

#include "ompi/communicator/communicator.h"
#include "ompi/datatype/ompi_datatype.h"
#include "ompi/datatype/ompi_datatype_internal.h"
#include "ompi/mca/coll/base/base.h"
#include "ompi/mca/coll/coll.h"
#include "ompi/request/request.h"
#include "opal/mca/base/mca_base_pvar.h"
#include "opal/runtime/opal_progress.h"

/* `op.h` asks for a header that Open MPI does not install. Of it no more than the name is needed. */
#define OMPI_OP_H
typedef struct ompi_op_t ompi_op_t;
#include "ompi/mca/coll/base/coll_base_util.h"

/*
 * Requests of a communicator that are under way at once. The endpoint has room for 1,024 calls: so
 * others find room while nobody answers these.
 */
#define UNDER_WAY 64

/* What is kept of a communicator. */
struct module {
	mca_coll_base_module_t super;
	/* What the components below have, and their modules. */
	mca_coll_base_comm_coll_t below;
	struct group group;
	/* Requests of it that are under way. */
	int under_way;
	/* Requests that wait for room, in the order of their calls. Under the lock. */
	struct request *first, **last;
	/* Of those with such requests. */
	struct module *next;
};
typedef struct module module_t;

/* A call that does not block. Its end is Open MPI's to be told of. */
struct request {
	ompi_coll_base_nbc_request_t super;
	/* Held until the end: the communicator may be freed before. */
	module_t *m;
	struct plan plan;
	/* As the group's, for this call. */
	char *temp;
	/* Of those that wait for room, or are not in use. */
	struct request *next;
};
typedef struct request request_t;

OBJ_CLASS_INSTANCE(request_t, ompi_coll_base_nbc_request_t, NULL, NULL);

/* What a process has once. */
static struct {
	int priority;
	/* Our progress is among Open MPI's. */
	bool opened;
	/* A call that does not block was made. */
	bool requested;
	/*
	 * Requests that are not in use. They stay memory, since another thread may look at one
	 * that has ended. Under the lock.
	 */
	struct request *spare;
	/* Communicators with requests that wait for room. Under the lock. */
	struct module *late;
} ours;

/* ---- What coll.c asks for ---- */

static module_t *of(struct group *g)
{
	return (module_t *) ((char *) g - offsetof(module_t, group));
}

void face_say(int level, const char *what)
{
	opal_output_verbose(level, ompi_coll_base_framework.framework_output, "coll:barewire: %s",
			    what);
}

void face_progress(void)
{
	opal_progress();
}

int face_allgather(struct group *g, MPI_Comm comm, const void *one, void *all, int len)
{
	mca_coll_base_comm_coll_t *below = &of(g)->below;
	return below->coll_allgather(one, len, MPI_BYTE, all, len, MPI_BYTE, comm,
				     below->coll_allgather_module);
}

int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least)
{
	mca_coll_base_comm_coll_t *below = &of(g)->below;
	return below->coll_allreduce(one, least, 1, MPI_INT, MPI_MIN, comm,
				     below->coll_allreduce_module);
}

size_t face_size(MPI_Datatype type)
{
	size_t size;
	ompi_datatype_type_size(type, &size);
	return size;
}

ptrdiff_t face_extent(MPI_Datatype type)
{
	ptrdiff_t lb, extent;
	ompi_datatype_get_extent(type, &lb, &extent);
	return extent;
}

bool face_is_plain(MPI_Datatype type, size_t count, ptrdiff_t *before)
{
	ptrdiff_t extent;
	ompi_datatype_get_true_extent(type, before, &extent);
	return ompi_datatype_is_contiguous_memory_layout(type, count);
}

void face_pack(const struct part *from, void *to)
{
	ompi_datatype_sndrcv(from->buf, from->count, from->type, to, from->len,
			     &ompi_mpi_packed.dt);
}

void face_unpack(const void *from, const struct part *to)
{
	ompi_datatype_sndrcv((void *) from, to->len, &ompi_mpi_packed.dt, to->buf, to->count,
			     to->type);
}

/* Libfabric's types by Open MPI's number; 0 is none, others are one more. */
static const unsigned char TYPES[OMPI_DATATYPE_MPI_MAX_PREDEFINED] = {
	[OMPI_DATATYPE_MPI_INT8_T] = 1 + FI_INT8,
	[OMPI_DATATYPE_MPI_UINT8_T] = 1 + FI_UINT8,
	[OMPI_DATATYPE_MPI_INT16_T] = 1 + FI_INT16,
	[OMPI_DATATYPE_MPI_UINT16_T] = 1 + FI_UINT16,
	[OMPI_DATATYPE_MPI_INT32_T] = 1 + FI_INT32,
	[OMPI_DATATYPE_MPI_UINT32_T] = 1 + FI_UINT32,
	[OMPI_DATATYPE_MPI_INT64_T] = 1 + FI_INT64,
	[OMPI_DATATYPE_MPI_UINT64_T] = 1 + FI_UINT64,
	[OMPI_DATATYPE_MPI_LONG] = 1 + (sizeof(long) == 8 ? FI_INT64 : FI_INT32),
	[OMPI_DATATYPE_MPI_UNSIGNED_LONG] = 1 + (sizeof(long) == 8 ? FI_UINT64 : FI_UINT32),
	[OMPI_DATATYPE_MPI_AINT] = 1 + (sizeof(MPI_Aint) == 8 ? FI_INT64 : FI_INT32),
	[OMPI_DATATYPE_MPI_OFFSET] = 1 + FI_INT64,
	[OMPI_DATATYPE_MPI_COUNT] = 1 + FI_INT64,
	[OMPI_DATATYPE_MPI_C_BOOL] = 1 + FI_UINT8,
	[OMPI_DATATYPE_MPI_FLOAT] = 1 + FI_FLOAT,
	[OMPI_DATATYPE_MPI_DOUBLE] = 1 + FI_DOUBLE,
	[OMPI_DATATYPE_MPI_LONG_DOUBLE] = 1 + FI_LONG_DOUBLE,
	[OMPI_DATATYPE_MPI_C_COMPLEX] = 1 + FI_FLOAT_COMPLEX,
	[OMPI_DATATYPE_MPI_C_FLOAT_COMPLEX] = 1 + FI_FLOAT_COMPLEX,
	[OMPI_DATATYPE_MPI_C_DOUBLE_COMPLEX] = 1 + FI_DOUBLE_COMPLEX,
	[OMPI_DATATYPE_MPI_C_LONG_DOUBLE_COMPLEX] = 1 + FI_LONG_DOUBLE_COMPLEX,
	/* Those of Fortran, as long as they are default ones. */
	[OMPI_DATATYPE_MPI_INTEGER] = 1 + FI_INT32,
	[OMPI_DATATYPE_MPI_REAL] = 1 + FI_FLOAT,
	[OMPI_DATATYPE_MPI_DOUBLE_PRECISION] = 1 + FI_DOUBLE,
	[OMPI_DATATYPE_MPI_COMPLEX] = 1 + FI_FLOAT_COMPLEX,
	[OMPI_DATATYPE_MPI_DOUBLE_COMPLEX] = 1 + FI_DOUBLE_COMPLEX,
};

struct reduced face_reduced(MPI_Datatype type)
{
	struct reduced none = { 0 };
	if (!ompi_datatype_is_predefined(type) || type->id >= OMPI_DATATYPE_MPI_MAX_PREDEFINED)
		return none;
	/* Open MPI has looked whether the type has the operation. */
	return (struct reduced) { TYPES[type->id], EVERY };
}

/* ---- Requests ---- */

/* A request is over: 1, or a negative error. */
static void over(struct call *call, int end)
{
	request_t *r = (request_t *) ((char *) call - offsetof(request_t, plan.call));
	module_t *m = r->m;

	if (end < 0)
		r->super.super.req_status.MPI_ERROR = coll_failed(&m->group, end);
	else
		coll_deliver(call, &r->plan.to);
	free(r->temp);
	r->temp = NULL;
	__atomic_fetch_sub(&m->under_way, 1, __ATOMIC_RELAXED);
	ompi_request_complete(&r->super.super, true);
	OBJ_RELEASE(m);
}

/* Posts a request if there is room. It is under way, or has ended, unless it is -FI_EAGAIN. */
static ssize_t try_post(module_t *m, request_t *r)
{
	ssize_t err;

	if (__atomic_load_n(&m->under_way, __ATOMIC_RELAXED) >= UNDER_WAY)
		return -FI_EAGAIN;
	/* Another thread may see its end before the post returns. */
	__atomic_fetch_add(&m->under_way, 1, __ATOMIC_RELAXED);
	err = coll_post(&m->group, &r->plan.call);
	if (err == -FI_EAGAIN)
		__atomic_fetch_sub(&m->under_way, 1, __ATOMIC_RELAXED);
	return err;
}

/* Posts the requests that have waited for room. */
static void post_waiting(void)
{
	request_t *refused = NULL, *r;
	/* Modules without a request that waits. The rest of them has its turn in the next call. */
	module_t *done[16];
	size_t dones = 0;

	coll_lock();
	for (module_t **at = &ours.late; *at && dones < sizeof done / sizeof *done;) {
		module_t *m = *at;
		ssize_t err = 0;
		/* Another thread may see the end of what is posted, and release the module. */
		OBJ_RETAIN(m);
		while ((r = m->first) && (err = try_post(m, r)) != -FI_EAGAIN) {
			m->first = r->next;
			if (err) {
				r->plan.call.end = (int) err;
				r->next = refused;
				refused = r;
			}
		}
		if (r) {
			at = &m->next;
			OBJ_RELEASE(m); /* Not the last: `r` has one. */
		} else {
			*at = m->next;
			done[dones++] = m;
		}
	}
	coll_unlock();
	while (dones > 0)
		OBJ_RELEASE(done[--dones]);
	while ((r = refused)) {
		refused = r->next;
		over(&r->plan.call, r->plan.call.end);
	}
}

/* Ends what has completed, and posts what has waited. Returns how many have. */
static int poll_all(void)
{
	int n = coll_poll();
	if (OPAL_UNLIKELY(ours.late != NULL))
		post_waiting();
	return n;
}

void face_opened(void)
{
	ours.opened = true;
	opal_progress_register_lp(poll_all);
}

static void put_back(request_t *r)
{
	OMPI_REQUEST_FINI(&r->super.super);
	coll_lock();
	r->next = ours.spare;
	ours.spare = r;
	coll_unlock();
}

static int free_request(ompi_request_t **at)
{
	if (!REQUEST_COMPLETE(*at))
		return MPI_ERR_REQUEST;
	put_back((request_t *) *at);
	*at = MPI_REQUEST_NULL;
	return OMPI_SUCCESS;
}

/* MPI forbids it. */
static int cancel_request(ompi_request_t *r, int flag)
{
	(void) r;
	(void) flag;
	return MPI_ERR_REQUEST;
}

static request_t *new_request(module_t *m, ompi_communicator_t *comm)
{
	request_t *r;

	coll_lock();
	r = ours.spare;
	if (r)
		ours.spare = r->next;
	coll_unlock();
	if (!r)
		r = OBJ_NEW(request_t);
	if (!r)
		return NULL;
	OMPI_REQUEST_INIT(&r->super.super, false);
	r->super.super.req_type = OMPI_REQUEST_COLL;
	r->super.super.req_state = OMPI_REQUEST_ACTIVE;
	r->super.super.req_status = ompi_status_empty;
	r->super.super.req_free = free_request;
	r->super.super.req_cancel = cancel_request;
	r->super.super.req_mpi_object.comm = comm;
	r->temp = NULL;
	r->next = NULL;
	r->m = m;
	OBJ_RETAIN(m);
	return r;
}

/* Gives up a request that was not posted. */
static int give_up(request_t *r, int err)
{
	module_t *m = r->m;

	free(r->temp);
	put_back(r);
	OBJ_RELEASE(m);
	return err;
}

/* Begins a call, which ends with a request. */
static int begin(module_t *m, const struct plan *plan, ompi_communicator_t *comm,
		 ompi_request_t **request)
{
	size_t need = coll_beside(plan);
	request_t *r = new_request(m, comm);
	ssize_t err = -FI_EAGAIN;

	if (!r)
		return OMPI_ERR_OUT_OF_RESOURCE;
	if (need && !(r->temp = malloc(need)))
		return give_up(r, OMPI_ERR_OUT_OF_RESOURCE);
	r->plan = *plan;
	r->plan.call.ended = over;
	coll_lay(&r->plan, r->temp);
	/* Its end is waited for by Open MPI's progress alone, which asks the others seldom. */
	if (!__atomic_exchange_n(&ours.requested, true, __ATOMIC_RELAXED))
		opal_progress_register(poll_all);
	/* Before it can end. */
	*request = &r->super.super;
	coll_lock();
	if (!m->first)
		err = try_post(m, r);
	if (err == -FI_EAGAIN) {
		if (!m->first) {
			m->last = &m->first;
			m->next = ours.late;
			ours.late = m;
		}
		*m->last = r;
		m->last = &r->next;
		err = 0;
	}
	coll_unlock();
	if (!err)
		return MPI_SUCCESS;
	*request = MPI_REQUEST_NULL;
	__atomic_fetch_sub(&m->under_way, 1, __ATOMIC_RELAXED);
	return give_up(r, coll_failed(&m->group, (int) err));
}

/* Makes a call that is planned, or begins one with a request. */
static int make(module_t *m, struct plan *plan, ompi_communicator_t *comm,
		ompi_request_t **request)
{
	if (request)
		return begin(m, plan, comm, request);
	/* Those of before come first. */
	while (OPAL_UNLIKELY(__atomic_load_n(&m->first, __ATOMIC_ACQUIRE) != NULL)) {
		poll_all();
		opal_progress();
	}
	return coll_run(&m->group, plan);
}

/* Makes a call without elements. */
static int nothing(ompi_request_t **request)
{
	if (request)
		*request = &ompi_request_empty;
	return MPI_SUCCESS;
}

/* ---- MPI's calls ---- */

/* Each is written once, with a request or none; who has none waits. */

#define BELOW(name, ...) \
	(request ? m->below.coll_i##name(__VA_ARGS__, comm, request, \
					 m->below.coll_i##name##_module) \
		 : m->below.coll_##name(__VA_ARGS__, comm, m->below.coll_##name##_module))

/* Makes the call `w`, or has it made `below`. */
#define MAKE(below) do { \
	struct plan plan_; \
	switch (coll_plan(&m->group, comm, &w, !request, &plan_)) { \
	case OURS: \
		return make(m, &plan_, comm, request); \
	case EMPTY: \
		return nothing(request); \
	case NO_MEMORY: \
		return OMPI_ERR_OUT_OF_RESOURCE; \
	case LEFT: \
		break; \
	} \
	return below; \
} while (0)

/*
 * Whether MPI_Comm_idup may be who calls without blocking: it agrees on a number by such calls on
 * the communicator that is copied, at its own time, which has no order with the program's.
 */
static bool is_of_idup(int count, ompi_datatype_t *type, MPI_Op op)
{
	return count == 1 && type == MPI_INT && (op == MPI_MAX || op == MPI_MIN);
}

static int ibarrier(ompi_communicator_t *comm, ompi_request_t **request,
		    mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = { .kind = FI_BARRIER };

	MAKE(request ? m->below.coll_ibarrier(comm, request, m->below.coll_ibarrier_module)
		     : m->below.coll_barrier(comm, m->below.coll_barrier_module));
}

static int ibcast(void *buf, int count, ompi_datatype_t *type, int root, ompi_communicator_t *comm,
		  ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = { .kind = FI_BROADCAST, .rbuf = buf, .rcount = count, .rtype = type,
				  .root = root };

	MAKE(BELOW(bcast, buf, count, type, root));
}

static int iallreduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		      ompi_communicator_t *comm, ompi_request_t **request,
		      mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = { .kind = FI_ALLREDUCE, .sbuf = sbuf, .rbuf = rbuf, .rcount = count,
				  .rtype = type, .op = op };

	if (request && is_of_idup(count, type, op))
		return BELOW(allreduce, sbuf, rbuf, count, type, op);
	MAKE(BELOW(allreduce, sbuf, rbuf, count, type, op));
}

static int ireduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		   int root, ompi_communicator_t *comm, ompi_request_t **request,
		   mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = { .kind = FI_REDUCE, .sbuf = sbuf, .rbuf = rbuf, .rcount = count,
				  .rtype = type, .op = op, .root = root };

	MAKE(BELOW(reduce, sbuf, rbuf, count, type, op, root));
}

static int ireduce_scatter_block(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type,
				 MPI_Op op, ompi_communicator_t *comm, ompi_request_t **request,
				 mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = { .kind = FI_REDUCE_SCATTER, .sbuf = sbuf, .rbuf = rbuf,
				  .rcount = count, .rtype = type, .op = op };

	MAKE(BELOW(reduce_scatter_block, sbuf, rbuf, count, type, op));
}

/* A call with a source and a result of their own types. */
#define TWO_PARTS(call_kind) \
	{ .kind = call_kind, .sbuf = sbuf, .scount = scount, .stype = stype, .rbuf = rbuf, \
	  .rcount = rcount, .rtype = rtype }

static int iallgather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		      ompi_datatype_t *rtype, ompi_communicator_t *comm, ompi_request_t **request,
		      mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = TWO_PARTS(FI_ALLGATHER);

	MAKE(BELOW(allgather, sbuf, scount, stype, rbuf, rcount, rtype));
}

static int ialltoall(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		     ompi_datatype_t *rtype, ompi_communicator_t *comm, ompi_request_t **request,
		     mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct wanted w = TWO_PARTS(FI_ALLTOALL);

	MAKE(BELOW(alltoall, sbuf, scount, stype, rbuf, rcount, rtype));
}

static int igather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		   ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		   ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct wanted w = TWO_PARTS(FI_GATHER);

	w.root = root;
	MAKE(BELOW(gather, sbuf, scount, stype, rbuf, rcount, rtype, root));
}

static int iscatter(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		    ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		    ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct wanted w = TWO_PARTS(FI_SCATTER);

	w.root = root;
	MAKE(BELOW(scatter, sbuf, scount, stype, rbuf, rcount, rtype, root));
}

/* ---- Those that wait ---- */

static int barrier(ompi_communicator_t *comm, mca_coll_base_module_t *base)
{
	return ibarrier(comm, NULL, base);
}

static int bcast(void *buf, int count, ompi_datatype_t *type, int root, ompi_communicator_t *comm,
		 mca_coll_base_module_t *base)
{
	return ibcast(buf, count, type, root, comm, NULL, base);
}

static int allreduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		     ompi_communicator_t *comm, mca_coll_base_module_t *base)
{
	return iallreduce(sbuf, rbuf, count, type, op, comm, NULL, base);
}

static int reduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		  int root, ompi_communicator_t *comm, mca_coll_base_module_t *base)
{
	return ireduce(sbuf, rbuf, count, type, op, root, comm, NULL, base);
}

static int reduce_scatter_block(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type,
				MPI_Op op, ompi_communicator_t *comm, mca_coll_base_module_t *base)
{
	return ireduce_scatter_block(sbuf, rbuf, count, type, op, comm, NULL, base);
}

static int allgather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		     ompi_datatype_t *rtype, ompi_communicator_t *comm,
		     mca_coll_base_module_t *base)
{
	return iallgather(sbuf, scount, stype, rbuf, rcount, rtype, comm, NULL, base);
}

static int alltoall(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		    ompi_datatype_t *rtype, ompi_communicator_t *comm, mca_coll_base_module_t *base)
{
	return ialltoall(sbuf, scount, stype, rbuf, rcount, rtype, comm, NULL, base);
}

static int gather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		  ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		  mca_coll_base_module_t *base)
{
	return igather(sbuf, scount, stype, rbuf, rcount, rtype, root, comm, NULL, base);
}

static int scatter(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		   ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		   mca_coll_base_module_t *base)
{
	return iscatter(sbuf, scount, stype, rbuf, rcount, rtype, root, comm, NULL, base);
}

/* ---- The component ---- */

static void construct(module_t *m)
{
	memset((char *) m + sizeof m->super, 0, sizeof *m - sizeof m->super);
}

/* Every call that is ours, as `X(name)`. */
#define CALLS(X) \
	X(barrier) X(bcast) X(allreduce) X(reduce) X(reduce_scatter_block) X(allgather) \
	X(alltoall) X(gather) X(scatter) \
	X(ibarrier) X(ibcast) X(iallreduce) X(ireduce) X(ireduce_scatter_block) X(iallgather) \
	X(ialltoall) X(igather) X(iscatter)

static void destruct(module_t *m)
{
#define RELEASE(name) \
	if (m->below.coll_##name##_module) \
		OBJ_RELEASE(m->below.coll_##name##_module);
	CALLS(RELEASE)
	coll_forget(&m->group);
}

OBJ_CLASS_INSTANCE(module_t, mca_coll_base_module_t, construct, destruct);

static int enable(mca_coll_base_module_t *base, ompi_communicator_t *comm)
{
	module_t *m = (module_t *) base;
	mca_coll_base_comm_coll_t *below = comm->c_coll;

#define IS_THERE(name) \
	if (!below->coll_##name || !below->coll_##name##_module) \
		return OMPI_ERROR;
#define RETAIN(name) \
	m->below.coll_##name = below->coll_##name; \
	m->below.coll_##name##_module = below->coll_##name##_module; \
	OBJ_RETAIN(m->below.coll_##name##_module);
	CALLS(IS_THERE)
	CALLS(RETAIN)
	return OMPI_SUCCESS;
}

static mca_coll_base_module_t *query(ompi_communicator_t *comm, int *priority)
{
	module_t *m;

	*priority = ours.priority;
	if (OMPI_COMM_IS_INTER(comm) || ompi_comm_size(comm) < 2 || ours.priority < 0)
		return NULL;
	m = OBJ_NEW(module_t);
	if (!m)
		return NULL;
	m->group.rank = ompi_comm_rank(comm);
	m->group.size = ompi_comm_size(comm);
	m->super.coll_module_enable = enable;
#define OFFER(name) m->super.coll_##name = name;
	CALLS(OFFER)
	return &m->super;
}

static int init(bool progress_threads, bool threads)
{
	(void) progress_threads;
	coll.threads = threads;
	return OMPI_SUCCESS;
}

static int register_component(void);

static int close_component(void)
{
	if (ours.opened)
		opal_progress_unregister(poll_all);
	coll_close();
	while (ours.spare) {
		request_t *r = ours.spare;
		ours.spare = r->next;
		OBJ_RELEASE(r);
	}
	return OMPI_SUCCESS;
}

/* All else is hidden. */
__attribute__((visibility("default")))
mca_coll_base_component_t mca_coll_barewire_component = {
	.collm_version = {
		MCA_COLL_BASE_VERSION_2_0_0,
		.mca_component_name = "barewire",
		MCA_BASE_MAKE_VERSION(component, OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION,
				      OMPI_RELEASE_VERSION),
		.mca_close_component = close_component,
		.mca_register_component_params = register_component,
	},
	.collm_data = { MCA_BASE_METADATA_PARAM_NONE },
	.collm_init_query = init,
	.collm_comm_query = query,
};

static int register_component(void)
{
	mca_base_component_t *c = &mca_coll_barewire_component.collm_version;

	ours.priority = 80;
	mca_base_component_var_register(c, "priority",
		"Priority of barewire's collectives; below 0 they are not used",
		MCA_BASE_VAR_TYPE_INT, NULL, 0, 0, OPAL_INFO_LVL_5, MCA_BASE_VAR_SCOPE_READONLY,
		&ours.priority);
	/* Up to where it is faster than Open MPI's own over barewire's messages, on a node. */
	coll.max_bytes = 512;
	mca_base_component_var_register(c, "max_bytes",
		"Bytes of a block at most; calls with longer ones are left to other components",
		MCA_BASE_VAR_TYPE_INT, NULL, 0, 0, OPAL_INFO_LVL_5, MCA_BASE_VAR_SCOPE_READONLY,
		&coll.max_bytes);
	mca_base_component_pvar_register(c, "calls", "Collectives that barewire has made",
		OPAL_INFO_LVL_5, MCA_BASE_PVAR_CLASS_COUNTER, MCA_BASE_VAR_TYPE_UNSIGNED_LONG, NULL,
		MCA_BASE_VAR_BIND_NO_OBJECT,
		MCA_BASE_PVAR_FLAG_READONLY | MCA_BASE_PVAR_FLAG_CONTINUOUS, NULL, NULL, NULL,
		&coll.calls);
	return OMPI_SUCCESS;
}
