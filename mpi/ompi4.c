/*
 * Barewire's collectives for Open MPI 4.1: a `coll` component, found in a directory of
 * `mca_base_component_path`. coll.h says which calls it executes, and how. All other calls go to
 * the components of lower priority, the *fallback*.
 *
 * A nonblocking call is executed like a blocking one, with a request. Members agree on a group by
 * blocking calls only, so nonblocking calls go to the fallback until a blocking one has made the
 * group.
 *
 * A waiting call drives Open MPI's progress, so that other operations continue. barewire's progress
 * is registered with Open MPI's, so that requests complete and members that forward data do so in
 * any MPI call.
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

/* `op.h` includes a header that Open MPI does not install. Only the type's name is needed. */
#define OMPI_OP_H
typedef struct ompi_op_t ompi_op_t;
#include "ompi/mca/coll/base/coll_base_util.h"

/* State of a communicator. */
struct module {
	mca_coll_base_module_t super;
	/* Functions of the fallback's components, and their modules. */
	mca_coll_base_comm_coll_t fallback;
	struct group group;
};
typedef struct module module_t;

/* A request of Open MPI, and its call. */
struct coll_request {
	ompi_coll_base_nbc_request_t super;
	struct request r;
};
typedef struct coll_request coll_request_t;

OBJ_CLASS_INSTANCE(coll_request_t, ompi_coll_base_nbc_request_t, NULL, NULL);

/* State of the process. */
static struct {
	int priority;
	/* coll_progress is registered with Open MPI's progress. */
	bool opened;
} ours;

/* ---- Functions that coll.c calls ---- */

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
	mca_coll_base_comm_coll_t *fallback = &of(g)->fallback;
	return fallback->coll_allgather(one, len, MPI_BYTE, all, len, MPI_BYTE, comm,
				     fallback->coll_allgather_module);
}

int face_minimum(struct group *g, MPI_Comm comm, const int *one, int *least)
{
	mca_coll_base_comm_coll_t *fallback = &of(g)->fallback;
	return fallback->coll_allreduce(one, least, 1, MPI_INT, MPI_MIN, comm,
				     fallback->coll_allreduce_module);
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

MPI_Datatype face_keep(MPI_Datatype type)
{
	OBJ_RETAIN(type);
	return type;
}

void face_let_go(MPI_Datatype kept)
{
	OBJ_RELEASE(kept);
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

/* libfabric's datatype plus one by Open MPI's type number; 0: none. */
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
	/* Fortran's types of default kind. */
	[OMPI_DATATYPE_MPI_INTEGER] = 1 + FI_INT32,
	[OMPI_DATATYPE_MPI_REAL] = 1 + FI_FLOAT,
	[OMPI_DATATYPE_MPI_DOUBLE_PRECISION] = 1 + FI_DOUBLE,
	[OMPI_DATATYPE_MPI_COMPLEX] = 1 + FI_FLOAT_COMPLEX,
	[OMPI_DATATYPE_MPI_DOUBLE_COMPLEX] = 1 + FI_DOUBLE_COMPLEX,
};

struct reduction_type face_reduced(MPI_Datatype type)
{
	struct reduction_type none = { 0 };
	if (!ompi_datatype_is_predefined(type) || type->id >= OMPI_DATATYPE_MPI_MAX_PREDEFINED)
		return none;
	/* Open MPI has checked that the type supports the operation. */
	return (struct reduction_type) { TYPES[type->id], EVERY };
}

/* ---- Requests ---- */

static coll_request_t *coll_request_of(struct request *r)
{
	return (coll_request_t *) ((char *) r - offsetof(coll_request_t, r));
}

void face_hold(struct group *g)
{
	OBJ_RETAIN(of(g));
}

void face_release(struct group *g)
{
	module_t *m = of(g);
	OBJ_RELEASE(m);
}

void face_ended(struct request *r, int err)
{
	ompi_request_t *its = &coll_request_of(r)->super.super;

	if (err != MPI_SUCCESS)
		its->req_status.MPI_ERROR = err;
	ompi_request_complete(its, true);
}

void face_opened(void)
{
	ours.opened = true;
	opal_progress_register(coll_progress);
}

static void put_back(coll_request_t *a)
{
	OMPI_REQUEST_FINI(&a->super.super);
	coll_put_back(&a->r);
}

static int free_request(ompi_request_t **at)
{
	if (!REQUEST_COMPLETE(*at))
		return MPI_ERR_REQUEST;
	put_back((coll_request_t *) *at);
	*at = MPI_REQUEST_NULL;
	return OMPI_SUCCESS;
}

/* MPI forbids cancelling the request of a collective. */
static int cancel_request(ompi_request_t *r, int flag)
{
	(void) r;
	(void) flag;
	return MPI_ERR_REQUEST;
}

static coll_request_t *new_request(ompi_communicator_t *comm)
{
	struct request *spare = coll_spare();
	coll_request_t *a = spare ? coll_request_of(spare) : OBJ_NEW(coll_request_t);

	if (!a)
		return NULL;
	OMPI_REQUEST_INIT(&a->super.super, false);
	a->super.super.req_type = OMPI_REQUEST_COLL;
	a->super.super.req_state = OMPI_REQUEST_ACTIVE;
	a->super.super.req_status = ompi_status_empty;
	a->super.super.req_free = free_request;
	a->super.super.req_cancel = cancel_request;
	a->super.super.req_mpi_object.comm = comm;
	return a;
}

/* Executes a planned call, or begins it if there is a request. */
static int execute(module_t *m, struct plan *plan, ompi_communicator_t *comm,
		ompi_request_t **request)
{
	coll_request_t *a;
	int err;

	if (!request)
		return coll_run(&m->group, plan);
	a = new_request(comm);
	if (!a)
		return OMPI_ERR_OUT_OF_RESOURCE;
	/* Set before the call can complete. */
	*request = &a->super.super;
	err = coll_begin(&m->group, plan, &a->r);
	if (err != MPI_SUCCESS) {
		*request = MPI_REQUEST_NULL;
		put_back(a);
	}
	return err;
}

/* Completes a call without elements. */
static int complete_empty(ompi_request_t **request)
{
	if (request)
		*request = &ompi_request_empty;
	return MPI_SUCCESS;
}

/* ---- MPI's calls ---- */

/* Each is defined once, for the nonblocking call and, with a NULL request, for the blocking one. */

#define FALLBACK(name, ...) \
	(request ? m->fallback.coll_i##name(__VA_ARGS__, comm, request, \
					 m->fallback.coll_i##name##_module) \
		 : m->fallback.coll_##name(__VA_ARGS__, comm, m->fallback.coll_##name##_module))

/* Executes the call `w`, or evaluates `otherwise`, the fallback's call. */
#define EXECUTE(otherwise) do { \
	struct plan plan_; \
	switch (coll_plan(&m->group, comm, &w, !request, &plan_)) { \
	case OURS: \
		return execute(m, &plan_, comm, request); \
	case EMPTY: \
		return complete_empty(request); \
	case NO_MEMORY: \
		return OMPI_ERR_OUT_OF_RESOURCE; \
	case LEFT: \
		break; \
	} \
	return otherwise; \
} while (0)

/*
 * Whether a nonblocking call may be MPI_Comm_idup's, which agrees on a communicator number by such
 * calls on the communicator being duplicated. They have no order with the program's own calls.
 */
static bool is_of_idup(int count, ompi_datatype_t *type, MPI_Op op)
{
	return count == 1 && type == MPI_INT && (op == MPI_MAX || op == MPI_MIN);
}

static int ibarrier(ompi_communicator_t *comm, ompi_request_t **request,
		    mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = { .kind = FI_BARRIER };

	EXECUTE(request ? m->fallback.coll_ibarrier(comm, request, m->fallback.coll_ibarrier_module)
		     : m->fallback.coll_barrier(comm, m->fallback.coll_barrier_module));
}

static int ibcast(void *buf, int count, ompi_datatype_t *type, int root, ompi_communicator_t *comm,
		  ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = { .kind = FI_BROADCAST, .rbuf = buf, .rcount = count,
				    .rtype = type, .root = root };

	EXECUTE(FALLBACK(bcast, buf, count, type, root));
}

static int iallreduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		      ompi_communicator_t *comm, ompi_request_t **request,
		      mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = { .kind = FI_ALLREDUCE, .sbuf = sbuf, .rbuf = rbuf,
				    .rcount = count, .rtype = type, .op = op };

	if (request && is_of_idup(count, type, op))
		return FALLBACK(allreduce, sbuf, rbuf, count, type, op);
	EXECUTE(FALLBACK(allreduce, sbuf, rbuf, count, type, op));
}

static int ireduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		   int root, ompi_communicator_t *comm, ompi_request_t **request,
		   mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = { .kind = FI_REDUCE, .sbuf = sbuf, .rbuf = rbuf, .rcount = count,
				  .rtype = type, .op = op, .root = root };

	EXECUTE(FALLBACK(reduce, sbuf, rbuf, count, type, op, root));
}

static int ireduce_scatter_block(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type,
				 MPI_Op op, ompi_communicator_t *comm, ompi_request_t **request,
				 mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = { .kind = FI_REDUCE_SCATTER, .sbuf = sbuf, .rbuf = rbuf,
				  .rcount = count, .rtype = type, .op = op };

	EXECUTE(FALLBACK(reduce_scatter_block, sbuf, rbuf, count, type, op));
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
	const struct mpi_call w = TWO_PARTS(FI_ALLGATHER);

	EXECUTE(FALLBACK(allgather, sbuf, scount, stype, rbuf, rcount, rtype));
}

static int ialltoall(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		     ompi_datatype_t *rtype, ompi_communicator_t *comm, ompi_request_t **request,
		     mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	const struct mpi_call w = TWO_PARTS(FI_ALLTOALL);

	EXECUTE(FALLBACK(alltoall, sbuf, scount, stype, rbuf, rcount, rtype));
}

static int igather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		   ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		   ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct mpi_call w = TWO_PARTS(FI_GATHER);

	w.root = root;
	EXECUTE(FALLBACK(gather, sbuf, scount, stype, rbuf, rcount, rtype, root));
}

static int iscatter(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		    ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		    ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct mpi_call w = TWO_PARTS(FI_SCATTER);

	w.root = root;
	EXECUTE(FALLBACK(scatter, sbuf, scount, stype, rbuf, rcount, rtype, root));
}

/* ---- Blocking calls ---- */

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

/* Every call of this component, as `X(name)`. */
#define CALLS(X) \
	X(barrier) X(bcast) X(allreduce) X(reduce) X(reduce_scatter_block) X(allgather) \
	X(alltoall) X(gather) X(scatter) \
	X(ibarrier) X(ibcast) X(iallreduce) X(ireduce) X(ireduce_scatter_block) X(iallgather) \
	X(ialltoall) X(igather) X(iscatter)

static void destruct(module_t *m)
{
#define RELEASE(name) \
	if (m->fallback.coll_##name##_module) \
		OBJ_RELEASE(m->fallback.coll_##name##_module);
	CALLS(RELEASE)
	coll_forget(&m->group);
}

OBJ_CLASS_INSTANCE(module_t, mca_coll_base_module_t, construct, destruct);

static int enable(mca_coll_base_module_t *base, ompi_communicator_t *comm)
{
	module_t *m = (module_t *) base;
	mca_coll_base_comm_coll_t *fallback = comm->c_coll;

#define IS_THERE(name) \
	if (!fallback->coll_##name || !fallback->coll_##name##_module) \
		return OMPI_ERROR;
#define RETAIN(name) \
	m->fallback.coll_##name = fallback->coll_##name; \
	m->fallback.coll_##name##_module = fallback->coll_##name##_module; \
	OBJ_RETAIN(m->fallback.coll_##name##_module);
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
	struct request *r;

	if (ours.opened)
		opal_progress_unregister(coll_progress);
	coll_close();
	while ((r = coll_spare())) {
		coll_request_t *a = coll_request_of(r);
		OBJ_RELEASE(a);
	}
	return OMPI_SUCCESS;
}

/* The only visible symbol. */
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
	/* Longest block with which it was faster on a node than Open MPI's collectives. */
	coll.max_bytes = 1 << 20;
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
