/*
 * Barewire's collectives under MPI: a component of Open MPI 4.1 (`coll`), found in a directory of
 * `mca_base_component_path`.
 *
 * A communicator of two or more members gets a group of fi_collective(3) at its first call: its
 * creation stays as cheap as it was, also for MPI_Comm_idup, whose creation must not wait, and a
 * communicator that makes no collective takes none of the 32 groups that go through memory. The
 * members agree on it by two calls of the components below, the *fallback*: who has no barewire, or
 * cannot join, keeps all of them from it, and nobody joins while another still computes.
 *
 * Which calls are taken must be found alike by all members. So it is decided by what MPI has alike
 * at all of them: call, bytes of a block, operation and type of a reduction. Layouts are not: who
 * has another one than its peers packs. All else is the fallback's: operations and types of the
 * user in reductions, MINLOC and MAXLOC, long blocks, intercommunicators, vectors of counts, and
 * neighbours.
 *
 * A call that does not block is the same with a request. To agree on a group takes waiting, so it
 * is the fallback's until a call that blocks has made the group.
 *
 * While a call waits it makes Open MPI's progress, so that everything else goes on; and our own is
 * among what Open MPI progresses, so that requests end and members that forward are not waited for.
 */
#include "ompi_config.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include "mpi.h"
#include "ompi/communicator/communicator.h"
#include "ompi/datatype/ompi_datatype.h"
#include "ompi/datatype/ompi_datatype_internal.h"
#include "ompi/mca/coll/base/base.h"
#include "ompi/mca/coll/coll.h"
#include "ompi/proc/proc.h"
#include "ompi/request/request.h"
#include "opal/class/opal_hash_table.h"
#include "opal/mca/base/mca_base_pvar.h"
#include "opal/runtime/opal_progress.h"
#include "opal/threads/mutex.h"

/* `op.h` asks for a header that Open MPI does not install. Of it no more than the name is needed. */
#define OMPI_OP_H
typedef struct ompi_op_t ompi_op_t;
#include "ompi/mca/coll/base/coll_base_util.h"

/* Looks at our own queue for each turn of Open MPI's progress, which asks every transport. */
#define POLLS 8

/*
 * Requests of a communicator that are under way at once. The endpoint has room for 1,024 calls: so
 * others find room while nobody answers these.
 */
#define UNDER_WAY 64

/* Where a member is, from member to member. `len` is 0 if it has no barewire. */
struct card {
	uint32_t len;
	char name[60];
};

enum state { UNTRIED, JOINED, DECLINED, FAILED };

/* What is kept of a communicator. */
struct module {
	mca_coll_base_module_t super;
	/* What the components below have, and their modules. */
	mca_coll_base_comm_coll_t below;
	enum state state;
	/* Its first error was said. */
	bool told;
	struct fid_mc *mc;
	fi_addr_t group;
	/* Addresses by rank. */
	fi_addr_t *members;
	/* How the join has ended: 0 not yet, 1 well, else a negative error. */
	int join_end;
	/* For blocks of calls that block, which are packed or must lie apart. */
	char *temp;
	size_t temp_len;
	/* Requests of it that are under way. */
	int under_way;
	/* Requests that wait for room, in the order of their calls. Under the lock. */
	struct request *first, **last;
	/* Of those with such requests. */
	struct module *next;
};
typedef struct module module_t;

/* One call. */
struct call {
	enum fi_collective_op kind;
	fi_addr_t root;
	enum fi_datatype type;
	enum fi_op op;
	/* Elements of a block. */
	size_t count;
	void *in, *out;
	/* 0 under way, 1 done, else a negative error of libfabric. */
	int end;
	/* Of a call that does not block. */
	struct request *request;
};

/* Blocks of a call as MPI has them. */
struct part {
	char *buf;
	size_t count;
	ompi_datatype_t *type;
	/* Bytes, without gaps. */
	size_t len;
	/* Has gaps, or overlaps the other part. */
	bool apart;
};

/* A call that does not block. Its end is Open MPI's to be told of. */
struct request {
	ompi_coll_base_nbc_request_t super;
	/* Held until the end: the communicator may be freed before. */
	module_t *m;
	struct call call;
	struct part to;
	/* As the module's, for this call. */
	char *temp;
	/* Of those that wait for room, or are not in use. */
	struct request *next;
};
typedef struct request request_t;

OBJ_CLASS_INSTANCE(request_t, ompi_coll_base_nbc_request_t, NULL, NULL);

/* What a process has once. */
static struct {
	bool tried, threads;
	int priority;
	int max_bytes;
	unsigned long calls;
	opal_mutex_t lock;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_eq *eq;
	struct fid_ep *ep;
	struct card card;
	/* From names of processes to addresses. */
	opal_hash_table_t known;
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

static void say(int level, const char *what, int err)
{
	opal_output_verbose(level, ompi_coll_base_framework.framework_output,
			    "coll:barewire: %s: %s", what, fi_strerror(-err));
}

/* ---- The end of a call ---- */

/* What MPI returns for the error of a call. */
static int failed(module_t *m, int err)
{
	if (!m->told)
		opal_output(0, "coll:barewire: a call failed: %s", fi_strerror(-err));
	m->told = true;
	return MPI_ERR_OTHER;
}

/* Brings the result of a call to where MPI wants it. */
static void deliver(const struct call *call, const struct part *to)
{
	__atomic_fetch_add(&ours.calls, 1, __ATOMIC_RELAXED);
	if (to->apart && to->len && to->buf)
		ompi_datatype_sndrcv(call->out, to->len, &ompi_mpi_packed.dt, to->buf, to->count,
				     to->type);
}

/* A call is over: 1, or a negative error. */
static void over(struct call *call, int end)
{
	request_t *r = call->request;
	module_t *m;

	if (!r) {
		__atomic_store_n(&call->end, end, __ATOMIC_RELEASE);
		return;
	}
	m = r->m;
	if (end < 0)
		r->super.super.req_status.MPI_ERROR = failed(m, end);
	else
		deliver(call, &r->to);
	free(r->temp);
	r->temp = NULL;
	__atomic_fetch_sub(&m->under_way, 1, __ATOMIC_RELAXED);
	ompi_request_complete(&r->super.super, true);
	OBJ_RELEASE(m);
}

static ssize_t post(module_t *m, struct call *c)
{
	switch (c->kind) {
	case FI_BARRIER:
		return fi_barrier(ours.ep, m->group, c);
	case FI_BROADCAST:
		return fi_broadcast(ours.ep, c->in ? c->in : c->out, c->count, NULL, m->group, c->root,
				    c->type, 0, c);
	case FI_ALLTOALL:
		return fi_alltoall(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->type, 0, c);
	case FI_ALLREDUCE:
		return fi_allreduce(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->type,
				    c->op, 0, c);
	case FI_ALLGATHER:
		return fi_allgather(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->type, 0,
				    c);
	case FI_REDUCE_SCATTER:
		return fi_reduce_scatter(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->type,
					 c->op, 0, c);
	case FI_REDUCE:
		return fi_reduce(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->root, c->type,
				 c->op, 0, c);
	case FI_SCATTER:
		return fi_scatter(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->root,
				  c->type, 0, c);
	case FI_GATHER:
		return fi_gather(ours.ep, c->in, c->count, NULL, c->out, NULL, m->group, c->root, c->type,
				 0, c);
	}
	return -FI_ENOSYS;
}

/* Posts a request if there is room. It is under way, or has ended, unless it is -FI_EAGAIN. */
static ssize_t try_post(module_t *m, request_t *r)
{
	ssize_t err;

	if (__atomic_load_n(&m->under_way, __ATOMIC_RELAXED) >= UNDER_WAY)
		return -FI_EAGAIN;
	/* Another thread may see its end before the post returns. */
	__atomic_fetch_add(&m->under_way, 1, __ATOMIC_RELAXED);
	err = post(m, &r->call);
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

	OPAL_THREAD_LOCK(&ours.lock);
	for (module_t **at = &ours.late; *at && dones < sizeof done / sizeof *done;) {
		module_t *m = *at;
		ssize_t err = 0;
		/* Another thread may see the end of what is posted, and release the module. */
		OBJ_RETAIN(m);
		while ((r = m->first) && (err = try_post(m, r)) != -FI_EAGAIN) {
			m->first = r->next;
			if (err) {
				r->call.end = (int) err;
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
	OPAL_THREAD_UNLOCK(&ours.lock);
	while (dones > 0)
		OBJ_RELEASE(done[--dones]);
	while ((r = refused)) {
		refused = r->next;
		over(&r->call, r->call.end);
	}
}

/* ---- Waiting ---- */

/* Ends what has completed. Returns how many. */
static int poll_cq(void)
{
	struct fi_cq_entry done[8];
	ssize_t n = fi_cq_read(ours.cq, done, 8);
	for (ssize_t i = 0; i < n; i++)
		over(done[i].op_context, 1);
	if (n == -FI_EAVAIL) {
		struct fi_cq_err_entry failed = { 0 };
		n = fi_cq_readerr(ours.cq, &failed, 0);
		if (n == 1)
			over(failed.op_context, -failed.err);
	}
	if (OPAL_UNLIKELY(ours.late != NULL))
		post_waiting();
	return n > 0 ? (int) n : 0;
}

/* Ends the joins that have. */
static void poll_eq(void)
{
	struct fi_eq_entry entry;
	uint32_t event;
	ssize_t n = fi_eq_read(ours.eq, &event, &entry, sizeof entry, 0);
	if (n >= (ssize_t) sizeof entry && event == FI_JOIN_COMPLETE)
		__atomic_store_n(&((module_t *) entry.context)->join_end, 1, __ATOMIC_RELEASE);
	if (n == -FI_EAVAIL) {
		struct fi_eq_err_entry failed = { 0 };
		if (fi_eq_readerr(ours.eq, &failed, 0) > 0)
			__atomic_store_n(&((module_t *) failed.context)->join_end, -failed.err,
					 __ATOMIC_RELEASE);
	}
}

/* Waits for what is written by the polls, and returns it. */
static int wait_for(const int *end)
{
	for (unsigned turn = 1; __atomic_load_n(end, __ATOMIC_ACQUIRE) == 0; turn++) {
		poll_cq();
		if (turn % POLLS == 0)
			opal_progress();
	}
	return *end;
}

/* ---- Barewire, once in a process ---- */

static int open_endpoint(struct fi_info *info)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_eq_attr eq = { .wait_obj = FI_WAIT_NONE };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	size_t len = sizeof ours.card.name;
	int err;

	if ((err = fi_fabric(info->fabric_attr, &ours.fabric, NULL)) ||
	    (err = fi_domain(ours.fabric, info, &ours.domain, NULL)) ||
	    (err = fi_cq_open(ours.domain, &cq, &ours.cq, NULL)) ||
	    (err = fi_eq_open(ours.fabric, &eq, &ours.eq, NULL)) ||
	    (err = fi_av_open(ours.domain, &av, &ours.av, NULL)) ||
	    (err = fi_endpoint(ours.domain, info, &ours.ep, NULL)) ||
	    (err = fi_ep_bind(ours.ep, &ours.cq->fid, FI_TRANSMIT | FI_RECV)) ||
	    (err = fi_ep_bind(ours.ep, &ours.av->fid, 0)) ||
	    (err = fi_ep_bind(ours.ep, &ours.eq->fid, 0)) ||
	    (err = fi_enable(ours.ep)) ||
	    (err = fi_getname(&ours.ep->fid, ours.card.name, &len)))
		return err;
	ours.card.len = len;
	return 0;
}

/* Opens barewire if that was not tried. `ours.card` says whether it is there. */
static void open_barewire(void)
{
	struct fi_info *hints, *info = NULL;
	int err = -FI_ENOMEM;

	if (ours.tried)
		return;
	ours.tried = true;
	hints = fi_allocinfo();
	if (hints) {
		hints->caps = FI_COLLECTIVE;
		hints->ep_attr->type = FI_EP_RDM;
		hints->domain_attr->threading = ours.threads ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
		hints->fabric_attr->prov_name = strdup("barewire");
		err = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info);
		fi_freeinfo(hints);
	}
	if (!err) {
		err = open_endpoint(info);
		fi_freeinfo(info);
	}
	if (err)
		say(1, "no barewire here", err);
	else
		opal_progress_register_lp(poll_cq);
}

static void close_fid(struct fid *fid)
{
	int err = fid ? fi_close(fid) : 0;
	if (err)
		say(1, "fi_close", err);
}

static int close_component(void)
{
	if (ours.card.len)
		opal_progress_unregister(poll_cq);
	close_fid(ours.ep ? &ours.ep->fid : NULL);
	close_fid(ours.av ? &ours.av->fid : NULL);
	close_fid(ours.eq ? &ours.eq->fid : NULL);
	close_fid(ours.cq ? &ours.cq->fid : NULL);
	close_fid(ours.domain ? &ours.domain->fid : NULL);
	close_fid(ours.fabric ? &ours.fabric->fid : NULL);
	while (ours.spare) {
		request_t *r = ours.spare;
		ours.spare = r->next;
		OBJ_RELEASE(r);
	}
	OBJ_DESTRUCT(&ours.known);
	OBJ_DESTRUCT(&ours.lock);
	return OMPI_SUCCESS;
}

/* ---- A group, at a communicator's first call ---- */

/* Fills in the members' addresses. Returns 0, or a negative error. */
static int know(module_t *m, ompi_communicator_t *comm, const struct card *cards)
{
	int size = ompi_comm_size(comm), err = 0;

	m->members = malloc(size * sizeof *m->members);
	if (!m->members)
		return -FI_ENOMEM;
	OPAL_THREAD_LOCK(&ours.lock);
	for (int r = 0; r < size && !err; r++) {
		ompi_proc_t *proc = ompi_comm_peer_lookup(comm, r);
		uint64_t name = (uint64_t) proc->super.proc_name.jobid << 32 |
				proc->super.proc_name.vpid;
		void *addr;
		if (opal_hash_table_get_value_uint64(&ours.known, name, &addr) == OPAL_SUCCESS) {
			m->members[r] = (uintptr_t) addr;
		} else if (fi_av_insert(ours.av, cards[r].name, 1, &m->members[r], 0, NULL) != 1) {
			err = -FI_EHOSTUNREACH;
		} else {
			addr = (void *) (uintptr_t) m->members[r];
			opal_hash_table_set_value_uint64(&ours.known, name, addr);
		}
	}
	OPAL_THREAD_UNLOCK(&ours.lock);
	return err;
}

/* Joins the group of the members. Returns 0, or a negative error. */
static int join(module_t *m, ompi_communicator_t *comm)
{
	/* Threads join groups of the same members in different orders: the key tells them apart. */
	uint64_t key = ompi_comm_get_cid(comm);
	struct fi_av_set_attr none = {
		.start_addr = FI_ADDR_NOTAVAIL, .end_addr = FI_ADDR_NOTAVAIL,
		.comm_key = (uint8_t *) &key, .comm_key_size = sizeof key,
	};
	struct fid_av_set *set;
	fi_addr_t managed;
	int err = fi_av_set(ours.av, &none, &set, NULL);

	if (err)
		return err;
	for (int r = 0; r < ompi_comm_size(comm) && !err; r++)
		err = fi_av_set_insert(set, m->members[r]);
	if (!err)
		err = fi_av_set_addr(set, &managed);
	if (!err)
		err = fi_join_collective(ours.ep, managed, set, 0, &m->mc, m);
	while (!err && __atomic_load_n(&m->join_end, __ATOMIC_ACQUIRE) == 0) {
		poll_cq();
		poll_eq();
		opal_progress();
	}
	close_fid(&set->fid);
	if (!err && m->join_end < 0)
		err = m->join_end;
	if (!err)
		m->group = fi_mc_addr(m->mc);
	return err;
}

static void forget(module_t *m)
{
	close_fid(m->mc ? &m->mc->fid : NULL);
	free(m->members);
	m->mc = NULL;
	m->members = NULL;
	m->join_end = 0;
}

/* The members agree whether there is a group. */
static void set_up(module_t *m, ompi_communicator_t *comm)
{
	int size = ompi_comm_size(comm), mine = 1, all = 0, err = 0;
	struct card *cards = calloc(size + 1, sizeof *cards);

	/* The others cannot be told. */
	m->state = cards ? DECLINED : FAILED;
	if (!cards)
		return;
	OPAL_THREAD_LOCK(&ours.lock);
	open_barewire();
	OPAL_THREAD_UNLOCK(&ours.lock);
	cards[size] = ours.card;
	err = m->below.coll_allgather(&cards[size], sizeof *cards, MPI_BYTE, cards, sizeof *cards,
				      MPI_BYTE, comm, m->below.coll_allgather_module);
	if (err == MPI_SUCCESS) {
		for (int r = 0; r < size; r++)
			mine &= cards[r].len == ours.card.len && cards[r].len != 0;
		if (mine && !(err = know(m, comm, cards)))
			err = join(m, comm);
		if (err)
			say(1, "no group", err);
		mine = mine && !err;
		if (m->below.coll_allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, comm,
					    m->below.coll_allreduce_module) != MPI_SUCCESS)
			all = 0;
	}
	free(cards);
	if (all)
		m->state = JOINED;
	else
		forget(m);
	opal_output_verbose(10, ompi_coll_base_framework.framework_output,
			    "coll:barewire: communicator %d (%s) of %d: %s",
			    (int) ompi_comm_get_cid(comm), comm->c_name, size,
			    m->state == JOINED ? "a group" : "left to other components");
}

/*
 * Whether a call with blocks of so many bytes is ours, or FAILED. All members find the same. One
 * with a request must not wait.
 */
static bool takes(module_t *m, ompi_communicator_t *comm, size_t block, ompi_request_t **request)
{
	/* All blocks together are counted by an int where they are packed. */
	if (block > (size_t) ours.max_bytes || block * ompi_comm_size(comm) > INT32_MAX)
		return false;
	if (OPAL_UNLIKELY(m->state == UNTRIED && !request))
		set_up(m, comm);
	return m->state == JOINED || m->state == FAILED;
}

/* ---- A call ---- */

static size_t bytes(ompi_datatype_t *type, size_t count)
{
	size_t size;
	ompi_datatype_type_size(type, &size);
	return size * count;
}

static struct part part(const void *buf, size_t count, ompi_datatype_t *type)
{
	struct part p = { (char *) buf, count, type, bytes(type, count), false };
	p.apart = !ompi_datatype_is_contiguous_memory_layout(type, count);
	return p;
}

static const struct part NOTHING;

/* Bytes beside MPI's own memory that a call needs. */
static size_t beside(const struct part *from, const struct part *to)
{
	return (from->apart ? from->len : 0) + (to->apart ? to->len : 0);
}

/* Where a part's bytes lie: its own memory, or `temp`, which is moved on. */
static void *place(const struct part *p, char **temp)
{
	ptrdiff_t lb, extent;
	char *at = *temp;

	if (p->len == 0)
		return NULL;
	if (p->apart) {
		*temp += p->len;
		return at;
	}
	ompi_datatype_get_true_extent(p->type, &lb, &extent);
	return p->buf + lb;
}

/* Fills in where a call's source and result are, and packs the source. */
static void lay(struct call *call, const struct part *from, const struct part *to, char *temp)
{
	call->in = place(from, &temp);
	call->out = place(to, &temp);
	if (from->apart && from->len)
		ompi_datatype_sndrcv(from->buf, from->count, from->type, call->in, from->len,
				     &ompi_mpi_packed.dt);
}

/* Makes a call and waits for its end. `to` is where the result goes. */
static int run(module_t *m, struct call *call, const struct part *from, const struct part *to)
{
	size_t need = beside(from, to);
	ssize_t err;

	if (need > m->temp_len) {
		free(m->temp);
		m->temp = malloc(need);
		m->temp_len = m->temp ? need : 0;
		if (!m->temp)
			return OMPI_ERR_OUT_OF_RESOURCE;
	}
	lay(call, from, to, m->temp);
	/* Those of before come first. */
	while (__atomic_load_n(&m->first, __ATOMIC_ACQUIRE) ||
	       (err = post(m, call)) == -FI_EAGAIN) {
		poll_cq();
		opal_progress();
	}
	if (!err && wait_for(&call->end) < 0)
		err = call->end;
	if (OPAL_UNLIKELY(err))
		return failed(m, (int) err);
	deliver(call, to);
	return MPI_SUCCESS;
}

static void put_back(request_t *r)
{
	OMPI_REQUEST_FINI(&r->super.super);
	OPAL_THREAD_LOCK(&ours.lock);
	r->next = ours.spare;
	ours.spare = r;
	OPAL_THREAD_UNLOCK(&ours.lock);
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

	OPAL_THREAD_LOCK(&ours.lock);
	r = ours.spare;
	if (r)
		ours.spare = r->next;
	OPAL_THREAD_UNLOCK(&ours.lock);
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
static int begin(module_t *m, const struct call *call, const struct part *from,
		 const struct part *to, ompi_communicator_t *comm, ompi_request_t **request)
{
	size_t need = beside(from, to);
	request_t *r = new_request(m, comm);
	ssize_t err = -FI_EAGAIN;

	if (!r)
		return OMPI_ERR_OUT_OF_RESOURCE;
	if (need && !(r->temp = malloc(need)))
		return give_up(r, OMPI_ERR_OUT_OF_RESOURCE);
	r->to = *to;
	r->call = *call;
	r->call.request = r;
	lay(&r->call, from, to, r->temp);
	/* Its end is waited for by Open MPI's progress alone, which asks the others seldom. */
	if (!__atomic_exchange_n(&ours.requested, true, __ATOMIC_RELAXED))
		opal_progress_register(poll_cq);
	/* Before it can end. */
	*request = &r->super.super;
	OPAL_THREAD_LOCK(&ours.lock);
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
	OPAL_THREAD_UNLOCK(&ours.lock);
	if (!err)
		return MPI_SUCCESS;
	*request = MPI_REQUEST_NULL;
	__atomic_fetch_sub(&m->under_way, 1, __ATOMIC_RELAXED);
	return give_up(r, failed(m, (int) err));
}

/* Makes a call, or begins one with a request. `to` is where the result goes. */
static int make(module_t *m, struct call *call, struct part from, struct part to,
		ompi_communicator_t *comm, ompi_request_t **request)
{
	if (m->state == FAILED)
		return OMPI_ERR_OUT_OF_RESOURCE;
	return request ? begin(m, call, &from, &to, comm, request) : run(m, call, &from, &to);
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

/* Bytes of libfabric's types. */
static const unsigned char SIZES[] = {
	[FI_INT8] = 1, [FI_UINT8] = 1, [FI_INT16] = 2, [FI_UINT16] = 2, [FI_INT32] = 4,
	[FI_UINT32] = 4, [FI_INT64] = 8, [FI_UINT64] = 8, [FI_FLOAT] = 4, [FI_DOUBLE] = 8,
	[FI_FLOAT_COMPLEX] = 8, [FI_DOUBLE_COMPLEX] = 16, [FI_LONG_DOUBLE] = 16,
	[FI_LONG_DOUBLE_COMPLEX] = 32,
};

/* Operations that are ours. All of them are commutative. */
static const struct {
	MPI_Op mpi;
	enum fi_op fi;
} OPS[] = {
	{ MPI_SUM, FI_SUM }, { MPI_MAX, FI_MAX }, { MPI_MIN, FI_MIN }, { MPI_PROD, FI_PROD },
	{ MPI_LAND, FI_LAND }, { MPI_BAND, FI_BAND }, { MPI_LOR, FI_LOR }, { MPI_BOR, FI_BOR },
	{ MPI_LXOR, FI_LXOR }, { MPI_BXOR, FI_BXOR },
};

/* Fills in type and operation, if they are ours. */
static bool reduces(struct call *call, ompi_datatype_t *type, MPI_Op op)
{
	size_t o = 0, count = sizeof OPS / sizeof *OPS;
	unsigned ty;

	if (!ompi_datatype_is_predefined(type) || type->id >= OMPI_DATATYPE_MPI_MAX_PREDEFINED)
		return false;
	ty = TYPES[type->id];
	while (o < count && OPS[o].mpi != op)
		o++;
	if (!ty || o == count || SIZES[ty - 1] != bytes(type, 1))
		return false;
	call->type = ty - 1;
	call->op = OPS[o].fi;
	return true;
}

/*
 * Whether MPI_Comm_idup may be who calls without blocking: it agrees on a number by such calls on
 * the communicator that is copied, at its own time, which has no order with the program's.
 */
static bool is_of_idup(int count, ompi_datatype_t *type, MPI_Op op)
{
	return count == 1 && type == MPI_INT && (op == MPI_MAX || op == MPI_MIN);
}

static fi_addr_t address(const module_t *m, int r)
{
	return m->state == JOINED ? m->members[r] : FI_ADDR_NOTAVAIL;
}

/* A call that moves blocks as they are. */
static struct call moves(enum fi_collective_op kind, size_t block, fi_addr_t root)
{
	struct call call = { .kind = kind, .type = FI_UINT8, .count = block, .root = root };
	return call;
}

/* The part of a member that gave MPI_IN_PLACE for a block: it lies in the other, at its rank. */
static struct part own_block(void *all, size_t count, ompi_datatype_t *type, int rank)
{
	struct part p = part(all, count, type);
	ptrdiff_t lb, extent;

	ompi_datatype_get_extent(type, &lb, &extent);
	p.buf += (ptrdiff_t) (rank * count) * extent;
	p.apart = true;
	return p;
}

static int ibarrier(ompi_communicator_t *comm, ompi_request_t **request,
		    mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct call call = { .kind = FI_BARRIER };

	if (!takes(m, comm, 0, request))
		return request ? m->below.coll_ibarrier(comm, request,
							m->below.coll_ibarrier_module)
			       : m->below.coll_barrier(comm, m->below.coll_barrier_module);
	return make(m, &call, NOTHING, NOTHING, comm, request);
}

static int ibcast(void *buf, int count, ompi_datatype_t *type, int root, ompi_communicator_t *comm,
		  ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct part all = part(buf, count, type);

	if (all.len == 0)
		return nothing(request);
	if (!takes(m, comm, all.len, request))
		return BELOW(bcast, buf, count, type, root);
	struct call call = moves(FI_BROADCAST, all.len, address(m, root));
	if (ompi_comm_rank(comm) == root)
		return make(m, &call, all, NOTHING, comm, request);
	return make(m, &call, NOTHING, all, comm, request);
}

static int iallreduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		      ompi_communicator_t *comm, ompi_request_t **request,
		      mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct call call = { .kind = FI_ALLREDUCE, .count = count };
	struct part to = part(rbuf, count, type), from = to;

	if (to.len == 0)
		return nothing(request);
	if (!reduces(&call, type, op) || (request && is_of_idup(count, type, op)) ||
	    !takes(m, comm, to.len, request))
		return BELOW(allreduce, sbuf, rbuf, count, type, op);
	if (sbuf != MPI_IN_PLACE)
		from.buf = (char *) sbuf;
	return make(m, &call, from, to, comm, request);
}

static int ireduce(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type, MPI_Op op,
		   int root, ompi_communicator_t *comm, ompi_request_t **request,
		   mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct call call = { .kind = FI_REDUCE, .count = count };
	struct part from = part(sbuf == MPI_IN_PLACE ? rbuf : sbuf, count, type);

	if (from.len == 0)
		return nothing(request);
	if (!reduces(&call, type, op) || !takes(m, comm, from.len, request))
		return BELOW(reduce, sbuf, rbuf, count, type, op, root);
	call.root = address(m, root);
	return make(m, &call, from,
		    ompi_comm_rank(comm) == root ? part(rbuf, count, type) : NOTHING, comm,
		    request);
}

static int ireduce_scatter_block(const void *sbuf, void *rbuf, int count, ompi_datatype_t *type,
				 MPI_Op op, ompi_communicator_t *comm, ompi_request_t **request,
				 mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	struct call call = { .kind = FI_REDUCE_SCATTER, .count = count };
	struct part to = part(rbuf, count, type);
	size_t all = (size_t) count * ompi_comm_size(comm);

	if (to.len == 0)
		return nothing(request);
	if (!reduces(&call, type, op) || !takes(m, comm, to.len, request))
		return BELOW(reduce_scatter_block, sbuf, rbuf, count, type, op);
	if (sbuf != MPI_IN_PLACE)
		return make(m, &call, part(sbuf, all, type), to, comm, request);
	to.apart = true;
	return make(m, &call, part(rbuf, all, type), to, comm, request);
}

static int iallgather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		      ompi_datatype_t *rtype, ompi_communicator_t *comm, ompi_request_t **request,
		      mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	size_t block = bytes(rtype, rcount);
	struct call call = moves(FI_ALLGATHER, block, FI_ADDR_NOTAVAIL);

	if (block == 0)
		return nothing(request);
	if (!takes(m, comm, block, request))
		return BELOW(allgather, sbuf, scount, stype, rbuf, rcount, rtype);
	return make(m, &call,
		    sbuf == MPI_IN_PLACE ? own_block(rbuf, rcount, rtype, ompi_comm_rank(comm))
					 : part(sbuf, scount, stype),
		    part(rbuf, (size_t) rcount * ompi_comm_size(comm), rtype), comm, request);
}

static int ialltoall(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		     ompi_datatype_t *rtype, ompi_communicator_t *comm, ompi_request_t **request,
		     mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	size_t block = bytes(rtype, rcount), size = ompi_comm_size(comm);
	struct call call = moves(FI_ALLTOALL, block, FI_ADDR_NOTAVAIL);
	struct part to = part(rbuf, rcount * size, rtype), from = to;

	if (block == 0)
		return nothing(request);
	if (!takes(m, comm, block, request))
		return BELOW(alltoall, sbuf, scount, stype, rbuf, rcount, rtype);
	if (sbuf != MPI_IN_PLACE)
		from = part(sbuf, scount * size, stype);
	else
		from.apart = true;
	return make(m, &call, from, to, comm, request);
}

static int igather(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		   ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		   ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	bool is_root = ompi_comm_rank(comm) == root;
	size_t block = is_root ? bytes(rtype, rcount) : bytes(stype, scount);

	if (block == 0)
		return nothing(request);
	if (!takes(m, comm, block, request))
		return BELOW(gather, sbuf, scount, stype, rbuf, rcount, rtype, root);
	struct call call = moves(FI_GATHER, block, address(m, root));
	if (!is_root)
		return make(m, &call, part(sbuf, scount, stype), NOTHING, comm, request);
	return make(m, &call,
		    sbuf == MPI_IN_PLACE ? own_block(rbuf, rcount, rtype, root)
					 : part(sbuf, scount, stype),
		    part(rbuf, (size_t) rcount * ompi_comm_size(comm), rtype), comm, request);
}

static int iscatter(const void *sbuf, int scount, ompi_datatype_t *stype, void *rbuf, int rcount,
		    ompi_datatype_t *rtype, int root, ompi_communicator_t *comm,
		    ompi_request_t **request, mca_coll_base_module_t *base)
{
	module_t *m = (module_t *) base;
	bool is_root = ompi_comm_rank(comm) == root;
	size_t block = is_root ? bytes(stype, scount) : bytes(rtype, rcount);

	if (block == 0)
		return nothing(request);
	if (!takes(m, comm, block, request))
		return BELOW(scatter, sbuf, scount, stype, rbuf, rcount, rtype, root);
	struct call call = moves(FI_SCATTER, block, address(m, root));
	/* The root's own block stays where it is: what comes back is not kept. */
	struct part to = { .len = block, .apart = true };
	if (rbuf != MPI_IN_PLACE)
		to = part(rbuf, rcount, rtype);
	if (!is_root)
		return make(m, &call, NOTHING, to, comm, request);
	return make(m, &call, part(sbuf, (size_t) scount * ompi_comm_size(comm), stype), to, comm,
		    request);
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
	forget(m);
	free(m->temp);
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
	m->super.coll_module_enable = enable;
#define OFFER(name) m->super.coll_##name = name;
	CALLS(OFFER)
	return &m->super;
}

static int init(bool progress_threads, bool threads)
{
	(void) progress_threads;
	ours.threads = threads;
	return OMPI_SUCCESS;
}

static int register_component(void);

static int open_component(void)
{
	OBJ_CONSTRUCT(&ours.lock, opal_mutex_t);
	OBJ_CONSTRUCT(&ours.known, opal_hash_table_t);
	return opal_hash_table_init(&ours.known, 64);
}

mca_coll_base_component_t mca_coll_barewire_component = {
	.collm_version = {
		MCA_COLL_BASE_VERSION_2_0_0,
		.mca_component_name = "barewire",
		MCA_BASE_MAKE_VERSION(component, OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION,
				      OMPI_RELEASE_VERSION),
		.mca_open_component = open_component,
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
	ours.max_bytes = 512;
	mca_base_component_var_register(c, "max_bytes",
		"Bytes of a block at most; calls with longer ones are left to other components",
		MCA_BASE_VAR_TYPE_INT, NULL, 0, 0, OPAL_INFO_LVL_5, MCA_BASE_VAR_SCOPE_READONLY,
		&ours.max_bytes);
	mca_base_component_pvar_register(c, "calls", "Collectives that barewire has made",
		OPAL_INFO_LVL_5, MCA_BASE_PVAR_CLASS_COUNTER, MCA_BASE_VAR_TYPE_UNSIGNED_LONG, NULL,
		MCA_BASE_VAR_BIND_NO_OBJECT,
		MCA_BASE_PVAR_FLAG_READONLY | MCA_BASE_PVAR_FLAG_CONTINUOUS, NULL, NULL, NULL,
		&ours.calls);
	return OMPI_SUCCESS;
}
