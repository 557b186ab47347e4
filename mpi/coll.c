/* MPI collectives over barewire's, the part that is common to all MPIs: see coll.h. */
#include "coll.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fi_cm.h>
#include <rdma/fi_eq.h>

struct coll coll;

/*
 * Functions of libfabric that are called by name; all others are reached through its objects. It is
 * not linked: an MPI may have loaded a libfabric of its own, and of two libraries of one name in a
 * process one would get the other's calls. So the loaded one is used, else the system's.
 */
static struct {
	int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
		       const struct fi_info *hints, struct fi_info **info);
	void (*freeinfo)(struct fi_info *info);
	struct fi_info *(*dupinfo)(const struct fi_info *info);
	int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
	const char *(*strerror)(int err);
} lib;

/* A process that is a member of a group. */
struct peer {
	struct member card;
	fi_addr_t addr;
};

/* Private state of the process. */
static struct {
	bool tried;
	pthread_mutex_t lock;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_eq *eq;
	struct fid_ep *ep;
	struct member card;
	/* Hash table by name: a power of 2, at most half full. `len` 0 marks a free slot. */
	struct peer *known;
	size_t known_room, known_count;
	/* Requests that have begun and not ended. */
	int begun;
	/* Groups with requests that wait for room. Under the lock. */
	struct group *late;
	/* Free requests. Under the lock. */
	struct request *spare;
} ours = { .lock = PTHREAD_MUTEX_INITIALIZER };

void coll_lock(void)
{
	if (coll.threads)
		pthread_mutex_lock(&ours.lock);
}

void coll_unlock(void)
{
	if (coll.threads)
		pthread_mutex_unlock(&ours.lock);
}

static void say(int level, const char *what, int err)
{
	char line[160];
	snprintf(line, sizeof line, "%s: %s", what, lib.strerror ? lib.strerror(-err) : "?");
	face_say(level, line);
}

/* ---- The end of a call ---- */

/* Converts the error of a call to an MPI error. */
static int failed(struct group *g, int err)
{
	if (!g->error_printed)
		say(0, "a call failed", err);
	g->error_printed = true;
	return MPI_ERR_OTHER;
}

/* Whether a result has to be copied from a separate buffer. */
static bool unpacks(const struct part *to)
{
	return to->apart && to->len && to->count;
}

/* Copies the result of an ended call to the program's memory. */
static void deliver(const struct call *call, const struct part *to)
{
	__atomic_fetch_add(&coll.calls, 1, __ATOMIC_RELAXED);
	if (unpacks(to))
		face_unpack(call->out, to);
}

/* Ends a call with 1, or a negative error. */
static void over(struct call *call, int end)
{
	if (call->ended)
		call->ended(call, end);
	else
		__atomic_store_n(&call->end, end, __ATOMIC_RELEASE);
}

/* Posts a prepared call. Returns 0, -FI_EAGAIN if there is no room, or another error. */
static ssize_t post(struct group *g, struct call *c)
{
	switch (c->kind) {
	case FI_BARRIER:
		return fi_barrier(ours.ep, g->addr, c);
	case FI_BROADCAST:
		return fi_broadcast(ours.ep, c->in ? c->in : c->out, c->count, NULL, g->addr, c->root,
				    c->type, 0, c);
	case FI_ALLTOALL:
		return fi_alltoall(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->type, 0, c);
	case FI_ALLREDUCE:
		return fi_allreduce(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->type,
				    c->op, 0, c);
	case FI_ALLGATHER:
		return fi_allgather(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->type, 0,
				    c);
	case FI_REDUCE_SCATTER:
		return fi_reduce_scatter(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->type,
					 c->op, 0, c);
	case FI_REDUCE:
		return fi_reduce(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->root, c->type,
				 c->op, 0, c);
	case FI_SCATTER:
		return fi_scatter(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->root,
				  c->type, 0, c);
	case FI_GATHER:
		return fi_gather(ours.ep, c->in, c->count, NULL, c->out, NULL, g->addr, c->root, c->type,
				 0, c);
	}
	return -FI_ENOSYS;
}

/* ---- Waiting ---- */

/* Ends completed calls. Returns their number. */
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
	return n > 0 ? (int) n : 0;
}

/* Ends completed joins. */
static void poll_eq(void)
{
	struct fi_eq_entry entry;
	uint32_t event;
	ssize_t n = fi_eq_read(ours.eq, &event, &entry, sizeof entry, 0);
	if (n >= (ssize_t) sizeof entry && event == FI_JOIN_COMPLETE)
		__atomic_store_n(&((struct group *) entry.context)->join_end, 1, __ATOMIC_RELEASE);
	if (n == -FI_EAVAIL) {
		struct fi_eq_err_entry failed = { 0 };
		/* The loss of the port belongs to no join; each ends by its own error. */
		if (fi_eq_readerr(ours.eq, &failed, 0) > 0 && failed.context)
			__atomic_store_n(&((struct group *) failed.context)->join_end, -failed.err,
					 __ATOMIC_RELEASE);
	}
}

/* Polls until `*end` is not 0, and returns it. */
static int wait_for(const int *end)
{
	for (unsigned turn = 1; __atomic_load_n(end, __ATOMIC_ACQUIRE) == 0; turn++) {
		poll_cq();
		if (turn % POLLS == 0)
			face_progress();
	}
	return *end;
}

/* ---- Barewire, once in a process ---- */

/* Finds libfabric. Returns 0, or -FI_ENOSYS. */
static int load(void)
{
	const char *name = getenv("BAREWIRE_MPI_LIBFABRIC");
	/* A loaded library is found by its name, whatever its path. It stays loaded. */
	void *library = dlopen(name && *name ? name : "libfabric.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		face_say(1, dlerror());
		return -FI_ENOSYS;
	}
	*(void **) &lib.getinfo = dlsym(library, "fi_getinfo");
	*(void **) &lib.freeinfo = dlsym(library, "fi_freeinfo");
	*(void **) &lib.dupinfo = dlsym(library, "fi_dupinfo");
	*(void **) &lib.fabric = dlsym(library, "fi_fabric");
	*(void **) &lib.strerror = dlsym(library, "fi_strerror");
	if (lib.getinfo && lib.freeinfo && lib.dupinfo && lib.fabric && lib.strerror)
		return 0;
	face_say(1, "this is no libfabric");
	return -FI_ENOSYS;
}

static int open_endpoint(struct fi_info *info)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_eq_attr eq = { .wait_obj = FI_WAIT_NONE };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	size_t len = sizeof ours.card.name;
	int err;

	if ((err = lib.fabric(info->fabric_attr, &ours.fabric, NULL)) ||
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

/* Opens barewire, once. `ours.card` shows whether it is available. */
static void open_barewire(void)
{
	struct fi_info *hints, *info = NULL;
	int err;

	if (ours.tried)
		return;
	ours.tried = true;
	ours.card.max_bytes = coll.max_bytes;
	if (load())
		return;
	hints = lib.dupinfo(NULL);
	err = hints ? 0 : -FI_ENOMEM;
	if (!err) {
		hints->caps = FI_COLLECTIVE;
		hints->ep_attr->type = FI_EP_RDM;
		hints->domain_attr->threading = coll.threads ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
		hints->fabric_attr->prov_name = strdup("barewire");
		err = lib.getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info);
		lib.freeinfo(hints);
	}
	if (!err) {
		err = open_endpoint(info);
		lib.freeinfo(info);
	}
	if (err)
		say(1, "no barewire here", err);
	else
		face_opened();
}

static void close_fid(struct fid *fid)
{
	int err = fid ? fi_close(fid) : 0;
	if (err)
		say(1, "fi_close", err);
}

void coll_close(void)
{
	close_fid(ours.ep ? &ours.ep->fid : NULL);
	close_fid(ours.av ? &ours.av->fid : NULL);
	close_fid(ours.eq ? &ours.eq->fid : NULL);
	close_fid(ours.cq ? &ours.cq->fid : NULL);
	close_fid(ours.domain ? &ours.domain->fid : NULL);
	close_fid(ours.fabric ? &ours.fabric->fid : NULL);
	free(ours.known);
	ours.ep = NULL;
	ours.av = NULL;
	ours.eq = NULL;
	ours.cq = NULL;
	ours.domain = NULL;
	ours.fabric = NULL;
	ours.known = NULL;
	ours.known_room = ours.known_count = 0;
	ours.card.len = 0;
}

/* ---- A group, at a communicator's first call ---- */

/* The slot of a process in a table with room. */
static struct peer *place_of(struct peer *table, size_t room, const struct member *card)
{
	uint64_t hash = 0xcbf29ce484222325;
	size_t at;

	for (uint32_t i = 0; i < card->len; i++)
		hash = (hash ^ (unsigned char) card->name[i]) * 0x100000001b3;
	at = (hash ^ hash >> 32) & (room - 1);
	while (table[at].card.len && memcmp(table[at].card.name, card->name, card->len))
		at = (at + 1) & (room - 1);
	return &table[at];
}

/* Makes room for another process. Returns 0 or -FI_ENOMEM. */
static int have_room(void)
{
	size_t room = ours.known_room ? 2 * ours.known_room : 64;
	struct peer *table;

	if (2 * ours.known_count < ours.known_room)
		return 0;
	table = calloc(room, sizeof *table);
	if (!table)
		return -FI_ENOMEM;
	for (size_t i = 0; i < ours.known_room; i++)
		if (ours.known[i].card.len)
			*place_of(table, room, &ours.known[i].card) = ours.known[i];
	free(ours.known);
	ours.known = table;
	ours.known_room = room;
	return 0;
}

/* Fills in the members' addresses. Returns 0, or a negative error. */
static int know(struct group *g, const struct member *cards)
{
	int err = 0;

	g->members = malloc(g->size * sizeof *g->members);
	if (!g->members)
		return -FI_ENOMEM;
	coll_lock();
	for (int r = 0; r < g->size && !err && !(err = have_room()); r++) {
		struct peer *known = place_of(ours.known, ours.known_room, &cards[r]);
		if (!known->card.len) {
			if (fi_av_insert(ours.av, cards[r].name, 1, &known->addr, 0, NULL) != 1) {
				err = -FI_EHOSTUNREACH;
				break;
			}
			known->card = cards[r];
			ours.known_count++;
		}
		g->members[r] = known->addr;
	}
	coll_unlock();
	return err;
}

/* Joins the group of the members. Returns 0, or a negative error. */
static int join(struct group *g, struct member *first)
{
	/*
	 * Threads join groups of the same members in different orders: the key tells them apart.
	 * It is the first member's name and its number of the group.
	 */
	struct fi_av_set_attr none = {
		.start_addr = FI_ADDR_NOTAVAIL, .end_addr = FI_ADDR_NOTAVAIL,
		.comm_key = (uint8_t *) first, .comm_key_size = sizeof *first,
	};
	struct fid_av_set *set;
	fi_addr_t managed;
	int err = fi_av_set(ours.av, &none, &set, NULL);

	if (err)
		return err;
	for (int r = 0; r < g->size && !err; r++)
		err = fi_av_set_insert(set, g->members[r]);
	if (!err)
		err = fi_av_set_addr(set, &managed);
	if (!err)
		err = fi_join_collective(ours.ep, managed, set, 0, &g->mc, g);
	while (!err && !__atomic_load_n(&g->join_end, __ATOMIC_ACQUIRE)) {
		poll_cq();
		poll_eq();
		face_progress();
	}
	close_fid(&set->fid);
	if (!err && g->join_end < 0)
		err = g->join_end;
	if (!err)
		g->addr = fi_mc_addr(g->mc);
	return err;
}

void coll_forget(struct group *g)
{
	close_fid(g->mc ? &g->mc->fid : NULL);
	free(g->members);
	free(g->temp);
	g->mc = NULL;
	g->members = NULL;
	g->temp = NULL;
	g->temp_len = 0;
	g->join_end = 0;
}

/* Negotiates with the other members whether there is a group. */
static void set_up(struct group *g, MPI_Comm comm)
{
	int mine = 1, all = 0, err = 0, len;
	struct member *cards = calloc(g->size + 1, sizeof *cards);
	char line[160], name[MPI_MAX_OBJECT_NAME];

	/* The other members cannot be notified. */
	g->state = cards ? DECLINED : FAILED;
	if (!cards)
		return;
	coll_lock();
	open_barewire();
	ours.card.serial++;
	cards[g->size] = ours.card;
	coll_unlock();
	if (face_allgather(g, comm, &cards[g->size], cards, sizeof *cards) == MPI_SUCCESS) {
		/* With different limits the members would take different calls. */
		for (int r = 0; r < g->size; r++)
			mine &= cards[r].len == ours.card.len && cards[r].len != 0 &&
				cards[r].max_bytes == ours.card.max_bytes;
		if (mine && !(err = know(g, cards)))
			err = join(g, &cards[0]);
		if (err)
			say(1, "no group", err);
		mine = mine && !err;
		if (face_minimum(g, comm, &mine, &all) != MPI_SUCCESS)
			all = 0;
	}
	free(cards);
	if (all)
		g->state = JOINED;
	else
		coll_forget(g);
	name[0] = 0;
	PMPI_Comm_get_name(comm, name, &len);
	snprintf(line, sizeof line, "communicator %.80s of %d: %s", name[0] ? name : "(no name)",
		 g->size, all ? "a group" : "left to others");
	face_say(10, line);
}

/*
 * Whether a call with blocks of so many bytes is ours, or FAILED. All members find the same. What
 * the MPI may not be able to make is ours at any length.
 */
static bool takes(struct group *g, MPI_Comm comm, const struct call *call, size_t block,
		  bool may_wait)
{
	int type = call->type;
	bool ours_alone = type == FLOAT16 || type == BFLOAT16;
	/* Calls in which a member has one block, which is not packed. */
	bool has_one = call->kind == FI_ALLREDUCE || call->kind == FI_REDUCE;
	size_t most = ours_alone ? INT32_MAX : (size_t) coll.max_bytes;

	/* All blocks together are counted by an int where they are packed. */
	if (coll.max_bytes < 0 || block > most || block * (has_one ? 1 : g->size) > INT32_MAX)
		return false;
	if (__builtin_expect(g->state == UNTRIED && may_wait, 0))
		set_up(g, comm);
	return g->state == JOINED || g->state == FAILED;
}

/* ---- A call ---- */

static const struct part NOTHING;

static struct part part(const void *buf, size_t count, MPI_Datatype type)
{
	struct part p = { (char *) buf, count, type, face_size(type) * count, 0, false };
	p.apart = !face_is_plain(type, count, &p.before);
	return p;
}

/* The part of a member with MPI_IN_PLACE for a block: the block of its rank in the other part. */
static struct part own_block(void *all, size_t count, MPI_Datatype type, int rank)
{
	struct part p = { all, count, type, face_size(type) * count, 0, true };
	p.buf += (ptrdiff_t) (rank * count) * face_extent(type);
	return p;
}

/* Bytes of separate buffers that a call needs, for `lay`. */
static size_t beside(const struct plan *p)
{
	return (p->from.apart ? p->from.len : 0) + (p->to.apart ? p->to.len : 0);
}

/* Memory of a part's bytes: its own, or `temp`, which is advanced. */
static void *place(const struct part *p, char **temp)
{
	char *at = *temp;

	if (p->len == 0)
		return NULL;
	if (!p->apart)
		return p->buf + p->before;
	*temp += p->len;
	return at;
}

/* Fills in where source and result of a call are, and packs the source. */
static void lay(struct plan *p, char *temp)
{
	p->call.in = place(&p->from, &temp);
	p->call.out = place(&p->to, &temp);
	if (p->from.apart && p->from.len)
		face_pack(&p->from, p->call.in);
}

int coll_run(struct group *g, struct plan *p)
{
	size_t need = beside(p);
	ssize_t err;

	/* Earlier requests come first. */
	while (__builtin_expect(__atomic_load_n(&g->first, __ATOMIC_ACQUIRE) != NULL, 0)) {
		coll_progress();
		face_progress();
	}
	if (need > g->temp_len) {
		free(g->temp);
		g->temp = malloc(need);
		g->temp_len = g->temp ? need : 0;
		if (!g->temp)
			return MPI_ERR_NO_MEM;
	}
	lay(p, g->temp);
	while ((err = post(g, &p->call)) == -FI_EAGAIN) {
		poll_cq();
		face_progress();
	}
	if (!err && wait_for(&p->call.end) < 0)
		err = p->call.end;
	if (__builtin_expect(err != 0, 0))
		return failed(g, (int) err);
	deliver(&p->call, &p->to);
	return MPI_SUCCESS;
}

/* ---- Calls that do not block ---- */

/* Frees the resources of a request, except its record. */
static void strip(struct request *r)
{
	if (unpacks(&r->plan.to))
		face_let_go(r->plan.to.type);
	free(r->temp);
	r->temp = NULL;
}

/* Ends a request with 1, or a negative error. */
static void request_over(struct call *call, int end)
{
	struct request *r = (struct request *) ((char *) call - offsetof(struct request, plan.call));
	struct group *g = r->group;
	int err = MPI_SUCCESS;

	if (end < 0)
		err = failed(g, end);
	else
		deliver(call, &r->plan.to);
	strip(r);
	__atomic_fetch_sub(&g->in_flight, 1, __ATOMIC_RELAXED);
	__atomic_fetch_sub(&ours.begun, 1, __ATOMIC_RELAXED);
	face_ended(r, err);
	face_release(g);
}

/* Posts a request if there is room. It is in flight or has ended, unless -FI_EAGAIN. */
static ssize_t try_post(struct group *g, struct request *r)
{
	ssize_t err;

	if (__atomic_load_n(&g->in_flight, __ATOMIC_RELAXED) >= IN_FLIGHT)
		return -FI_EAGAIN;
	/* Another thread may see its end before the post returns. */
	__atomic_fetch_add(&g->in_flight, 1, __ATOMIC_RELAXED);
	err = post(g, &r->plan.call);
	if (err == -FI_EAGAIN)
		__atomic_fetch_sub(&g->in_flight, 1, __ATOMIC_RELAXED);
	return err;
}

/* Posts the requests that have waited for room. */
static void post_waiting(void)
{
	struct request *refused = NULL, *r;
	/* Groups without waiting requests leave the list; the next call serves the others. */
	struct group *done[16];
	size_t dones = 0;

	coll_lock();
	for (struct group **at = &ours.late; *at && dones < sizeof done / sizeof *done;) {
		struct group *g = *at;
		ssize_t err = 0;
		/* Another thread may end the posted request, and release the group. */
		face_hold(g);
		while ((r = g->first) && (err = try_post(g, r)) != -FI_EAGAIN) {
			g->first = r->next;
			if (err) {
				r->plan.call.end = (int) err;
				r->next = refused;
				refused = r;
			}
		}
		if (r) {
			at = &g->late;
			face_release(g); /* Not the last reference: `r` has one. */
		} else {
			*at = g->late;
			done[dones++] = g;
		}
	}
	coll_unlock();
	while (dones > 0)
		face_release(done[--dones]);
	while ((r = refused)) {
		refused = r->next;
		request_over(&r->plan.call, r->plan.call.end);
	}
}

int coll_progress(void)
{
	static unsigned turns;
	unsigned turn = __atomic_load_n(&turns, __ATOMIC_RELAXED);
	int n;

	/* Without requests this is progress for other members' messages. */
	if (!__atomic_load_n(&ours.begun, __ATOMIC_RELAXED)) {
		__atomic_store_n(&turns, turn + 1, __ATOMIC_RELAXED);
		if (turn % POLLS)
			return 0;
	}
	n = poll_cq();
	if (__builtin_expect(__atomic_load_n(&ours.late, __ATOMIC_RELAXED) != NULL, 0))
		post_waiting();
	return n;
}

int coll_begin(struct group *g, const struct plan *p, struct request *r)
{
	size_t need = beside(p);
	ssize_t err = -FI_EAGAIN;

	r->temp = need ? malloc(need) : NULL;
	if (need && !r->temp)
		return MPI_ERR_NO_MEM;
	r->group = g;
	r->next = NULL;
	r->plan = *p;
	if (unpacks(&p->to) && (r->plan.to.type = face_keep(p->to.type)) == MPI_DATATYPE_NULL) {
		free(r->temp);
		return MPI_ERR_NO_MEM;
	}
	r->plan.call.ended = request_over;
	lay(&r->plan, r->temp);
	face_hold(g);
	__atomic_fetch_add(&ours.begun, 1, __ATOMIC_RELAXED);
	coll_lock();
	if (!g->first)
		err = try_post(g, r);
	if (err == -FI_EAGAIN) {
		if (!g->first) {
			g->last = &g->first;
			g->late = ours.late;
			ours.late = g;
		}
		*g->last = r;
		g->last = &r->next;
		err = 0;
	}
	coll_unlock();
	if (!err)
		return MPI_SUCCESS;
	strip(r);
	__atomic_fetch_sub(&g->in_flight, 1, __ATOMIC_RELAXED);
	__atomic_fetch_sub(&ours.begun, 1, __ATOMIC_RELAXED);
	err = failed(g, (int) err);
	face_release(g);
	return (int) err;
}

struct request *coll_spare(void)
{
	struct request *r;

	coll_lock();
	r = ours.spare;
	if (r)
		ours.spare = r->next;
	coll_unlock();
	return r;
}

void coll_put_back(struct request *r)
{
	coll_lock();
	r->next = ours.spare;
	ours.spare = r;
	coll_unlock();
}

/* ---- MPI's calls ---- */

/* Sizes of libfabric's types, bytes. */
static const unsigned char SIZES[] = {
	[FI_INT8] = 1, [FI_UINT8] = 1, [FI_INT16] = 2, [FI_UINT16] = 2, [FI_INT32] = 4,
	[FI_UINT32] = 4, [FI_INT64] = 8, [FI_UINT64] = 8, [FI_FLOAT] = 4, [FI_DOUBLE] = 8,
	[FI_FLOAT_COMPLEX] = 8, [FI_DOUBLE_COMPLEX] = 16, [FI_LONG_DOUBLE] = 16,
	[FI_LONG_DOUBLE_COMPLEX] = 32, [FLOAT16] = 2, [BFLOAT16] = 2,
};

/* Operations that barewire has. All of them are commutative. */
static const struct {
	MPI_Op mpi;
	enum fi_op fi;
	unsigned kind;
} OPS[] = {
	{ MPI_SUM, FI_SUM, ARITHMETIC }, { MPI_MAX, FI_MAX, ORDER }, { MPI_MIN, FI_MIN, ORDER },
	{ MPI_PROD, FI_PROD, ARITHMETIC }, { MPI_LAND, FI_LAND, LOGIC }, { MPI_BAND, FI_BAND, BITS },
	{ MPI_LOR, FI_LOR, LOGIC }, { MPI_BOR, FI_BOR, BITS }, { MPI_LXOR, FI_LXOR, LOGIC },
	{ MPI_BXOR, FI_BXOR, BITS },
};

/* Fills in type and operation, if barewire has them. */
static bool reduces(struct call *call, MPI_Datatype type, MPI_Op op)
{
	struct reduction_type ty = face_reduced(type);
	size_t o = 0, count = sizeof OPS / sizeof *OPS;

	while (o < count && OPS[o].mpi != op)
		o++;
	if (!ty.type || o == count || !(OPS[o].kind & ty.kinds) ||
	    SIZES[ty.type - 1] != face_size(type))
		return false;
	call->type = ty.type - 1;
	call->op = OPS[o].fi;
	return true;
}

/* Fills in the source and result of a call in the program's memory. */
static void find_parts(const struct group *g, const struct mpi_call *w, struct plan *p)
{
	bool in_place = w->sbuf == MPI_IN_PLACE, is_root = g->rank == w->root;
	size_t size = g->size;

	switch (w->kind) {
	case FI_BARRIER:
		return;
	case FI_BROADCAST:
		*(is_root ? &p->from : &p->to) = part(w->rbuf, w->rcount, w->rtype);
		return;
	case FI_ALLREDUCE:
		p->to = part(w->rbuf, w->rcount, w->rtype);
		p->from = in_place ? p->to : part(w->sbuf, w->rcount, w->rtype);
		return;
	case FI_REDUCE:
		p->from = part(in_place ? w->rbuf : w->sbuf, w->rcount, w->rtype);
		if (is_root)
			p->to = part(w->rbuf, w->rcount, w->rtype);
		return;
	case FI_REDUCE_SCATTER:
		p->from = part(in_place ? w->rbuf : w->sbuf, w->rcount * size, w->rtype);
		p->to = part(w->rbuf, w->rcount, w->rtype);
		if (in_place)
			p->to.apart = true;
		return;
	case FI_ALLGATHER:
	case FI_GATHER:
		p->from = in_place ? own_block(w->rbuf, w->rcount, w->rtype, g->rank)
				   : part(w->sbuf, w->scount, w->stype);
		if (is_root || w->kind == FI_ALLGATHER)
			p->to = part(w->rbuf, w->rcount * size, w->rtype);
		return;
	case FI_ALLTOALL:
		p->to = part(w->rbuf, w->rcount * size, w->rtype);
		p->from = in_place ? p->to : part(w->sbuf, w->scount * size, w->stype);
		if (in_place)
			p->from.apart = true;
		return;
	case FI_SCATTER:
		if (is_root)
			p->from = part(w->sbuf, w->scount * size, w->stype);
		/* The root's own block stays in place: the received one is dropped. */
		if (w->rbuf == MPI_IN_PLACE)
			p->to = (struct part) { .len = p->call.count, .apart = true };
		else
			p->to = part(w->rbuf, w->rcount, w->rtype);
		return;
	}
}

/*
 * Whether what a member sends itself is as long as what it gets of that. Else the call is wrong, as
 * with a count below 0 or without a type, and the MPI says so.
 */
static bool fits(const struct mpi_call *w, const struct plan *p, size_t block, size_t size)
{
	switch (w->kind) {
	case FI_ALLGATHER:
	case FI_GATHER:
		return p->from.len == block;
	case FI_ALLTOALL:
		return p->from.len == block * size;
	case FI_SCATTER:
		return p->to.len == block;
	default:
		return true;
	}
}

enum answer coll_plan(struct group *g, MPI_Comm comm, const struct mpi_call *w, bool may_wait,
		      struct plan *p)
{
	bool is_root = g->rank == w->root;
	/* With MPI_IN_PLACE the block is in the other part. */
	bool sends = w->kind == FI_GATHER ? !is_root : w->kind == FI_SCATTER && is_root;
	int64_t count = sends ? w->scount : w->rcount;
	size_t block = 0;

	if (count < 0)
		return LEFT;
	if (w->kind != FI_BARRIER) {
		block = face_size(sends ? w->stype : w->rtype);
		if (__builtin_mul_overflow(block, (size_t) count, &block))
			return LEFT;
		if (block == 0)
			return EMPTY;
	}
	p->call = (struct call) { .kind = w->kind, .type = FI_UINT8, .count = block };
	p->from = p->to = NOTHING;
	if (w->kind == FI_ALLREDUCE || w->kind == FI_REDUCE || w->kind == FI_REDUCE_SCATTER) {
		if (!reduces(&p->call, w->rtype, w->op))
			return LEFT;
		p->call.count = count;
	}
	if (!takes(g, comm, &p->call, block, may_wait))
		return LEFT;
	if (g->state == FAILED)
		return NO_MEMORY;
	p->call.root = g->members[w->root];
	find_parts(g, w, p);
	return fits(w, p, block, g->size) ? OURS : LEFT;
}
