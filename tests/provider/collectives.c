/*
 * Collectives through libfabric's own calls: address vector sets, joins, the nine operations and
 * their query, among five endpoints of one process over the segment. One line for each check:
 * "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include "check.h"

#define N 5
#define COUNT 3
#define GUARD 0x5555555555555555ull

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_eq *eq;
	struct fid_ep *ep;
	struct fid_av_set *set;
	struct fid_mc *mc;
	fi_addr_t addr[N], group;
	uint64_t in[N * COUNT + 1], out[N * COUNT + 1];
};

static struct fid_fabric *fabric;
static struct side sides[N];
/* Ranks of the group, by side: it is the vector in reverse. */
static int rank_of(int i) { return N - 1 - i; }

static void start(struct side *s, struct fi_info *info)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_MSG };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_eq_attr eq = { .wait_obj = FI_WAIT_NONE };

	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &eq, &s->eq, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	must("bind cq", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind av", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("bind eq", fi_ep_bind(s->ep, &s->eq->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void progress(void)
{
	struct fi_cq_msg_entry none;
	for (int i = 0; i < N; i++)
		fi_cq_read(sides[i].cq, &none, 0);
}

/* One completion of every side, each with the context it called with. */
static void all_done(const char *name)
{
	time_t end = time(NULL) + 20;
	for (int i = 0; i < N; i++) {
		struct fi_cq_msg_entry e;
		ssize_t n;
		while ((n = fi_cq_read(sides[i].cq, &e, 1)) == -FI_EAGAIN && time(NULL) < end)
			progress();
		if (n != 1 || e.op_context != &sides[i] || e.flags != FI_COLLECTIVE)
			printf("BAD %s: side %d got %zd\n", name, i, n);
	}
}

static uint64_t source(int rank, int i) { return 1000u * (rank + 1) + i; }

/* Fills both buffers: sources first, then canaries. */
static void fill(int words)
{
	for (int i = 0; i < N; i++) {
		for (int k = 0; k < N * COUNT + 1; k++) {
			sides[i].in[k] = k < words ? source(rank_of(i), k) : GUARD;
			sides[i].out[k] = GUARD;
		}
	}
}

static int wrong;

static void same(const char *name, int i, const uint64_t *got, int words, uint64_t (*want)(int, int))
{
	for (int k = 0; k < words; k++) {
		if (got[k] != want(rank_of(i), k)) {
			printf("BAD %s: rank %d word %d is %llu\n", name, rank_of(i), k,
			       (unsigned long long) got[k]);
			wrong++;
		}
	}
	if (got[words] != GUARD) {
		printf("BAD %s: rank %d wrote behind its result\n", name, rank_of(i));
		wrong++;
	}
}

static uint64_t sum(int k)
{
	uint64_t s = 0;
	for (int r = 0; r < N; r++)
		s += source(r, k);
	return s;
}

static uint64_t total(int rank, int k) { (void) rank; return sum(k); }
static uint64_t part(int rank, int k) { return sum(rank * COUNT + k); }
static uint64_t gathered(int rank, int k) { (void) rank; return source(k / COUNT, k % COUNT); }
static uint64_t exchanged(int rank, int k) { return source(k / COUNT, rank * COUNT + k % COUNT); }
static uint64_t of_root(int rank, int k) { (void) rank; return source(rank_of(1), k); }
static uint64_t scattered(int rank, int k) { return source(rank_of(1), rank * COUNT + k); }

#define EACH(call) do { \
	for (int i = 0; i < N; i++) { \
		struct side *s = &sides[i]; \
		fi_addr_t root = s->addr[1]; \
		(void) root; \
		must(#call, call); \
	} \
	all_done(#call); \
} while (0)

#define CHECK(name, words, want) do { \
	int before = wrong; \
	for (int i = 0; i < N; i++) \
		same(name, i, sides[i].out, words, want); \
	expect(name, wrong, before); \
} while (0)

static void operations(void)
{
	EACH(fi_barrier(s->ep, s->group, s));
	expect("fi_barrier", 0, 0);
	EACH(fi_barrier2(s->ep, s->group, FI_COMPLETION, s));
	expect("fi_barrier2", 0, 0);

	fill(COUNT);
	for (int i = 0; i < N; i++)
		memcpy(sides[i].out, i == 1 ? sides[i].in : sides[i].out, COUNT * 8);
	EACH(fi_broadcast(s->ep, s->out, COUNT, NULL, s->group, root, FI_UINT64,
			  i == 1 ? FI_SEND : FI_RECV, s));
	CHECK("fi_broadcast", COUNT, of_root);
	fill(N * COUNT);
	EACH(fi_alltoall(s->ep, s->in, COUNT, NULL, s->out, NULL, s->group, FI_UINT64, 0, s));
	CHECK("fi_alltoall", N * COUNT, exchanged);
	fill(COUNT);
	EACH(fi_allreduce(s->ep, s->in, COUNT, NULL, s->out, NULL, s->group, FI_UINT64, FI_SUM, 0, s));
	CHECK("fi_allreduce", COUNT, total);
	fill(COUNT);
	EACH(fi_allgather(s->ep, s->in, COUNT, NULL, s->out, NULL, s->group, FI_UINT64, 0, s));
	CHECK("fi_allgather", N * COUNT, gathered);
	fill(N * COUNT);
	EACH(fi_reduce_scatter(s->ep, s->in, COUNT, NULL, s->out, NULL, s->group, FI_UINT64, FI_SUM, 0,
			       s));
	CHECK("fi_reduce_scatter", COUNT, part);
	fill(COUNT);
	EACH(fi_reduce(s->ep, s->in, COUNT, NULL, i == 1 ? s->out : NULL, NULL, s->group, root,
		       FI_UINT64, FI_SUM, 0, s));
	same("fi_reduce", 1, sides[1].out, COUNT, total);
	expect("fi_reduce leaves the others", sides[0].out[0] == GUARD, 1);
	fill(N * COUNT);
	EACH(fi_scatter(s->ep, i == 1 ? s->in : NULL, COUNT, NULL, s->out, NULL, s->group, root,
			FI_UINT64, 0, s));
	CHECK("fi_scatter", COUNT, scattered);
	fill(COUNT);
	EACH(fi_gather(s->ep, s->in, COUNT, NULL, i == 1 ? s->out : NULL, NULL, s->group, root,
		       FI_UINT64, 0, s));
	same("fi_gather", 1, sides[1].out, N * COUNT, gathered);
	expect("fi_gather leaves the others", sides[0].out[0] == GUARD, 1);

	for (int i = 0; i < N; i++)
		((double *) sides[i].in)[0] = i * 1.5;
	EACH(fi_allreduce(s->ep, s->in, 1, NULL, s->out, NULL, s->group, FI_DOUBLE, FI_MAX, 0, s));
	expect("fi_allreduce of doubles", ((double *) sides[2].out)[0] == (N - 1) * 1.5, 1);
}

static void queries(void)
{
	struct fi_collective_attr attr = { .op = FI_SUM, .datatype = FI_UINT64 };
	struct fid_domain *d = sides[0].domain;
	expect("query allreduce", fi_query_collective(d, FI_ALLREDUCE, &attr, 0), 0);
	expect("its size", attr.datatype_attr.size, 8);
	expect("its count", attr.datatype_attr.count, 1ll << 29);
	expect("its members", attr.max_members >= 1000000, 1);
	attr.op = FI_BOR;
	attr.datatype = FI_FLOAT;
	expect("query BOR of floats", fi_query_collective(d, FI_ALLREDUCE, &attr, 0), -FI_EOPNOTSUPP);
	attr.op = FI_NOOP;
	attr.datatype = FI_VOID;
	expect("query barrier", fi_query_collective(d, FI_BARRIER, &attr, 0), 0);
	expect("query no such", fi_query_collective(d, 77, &attr, 0), -FI_EOPNOTSUPP);
	struct side *s = &sides[0];
	expect("BOR of floats", fi_allreduce(s->ep, s->in, 1, NULL, s->out, NULL, s->group, FI_FLOAT,
					     FI_BOR, 0, NULL), -FI_EOPNOTSUPP);
	expect("a root that is no member", fi_broadcast(s->ep, s->in, 1, NULL, s->group, 77, FI_UINT64,
							0, NULL), -FI_EINVAL);
	expect("a contradiction", fi_broadcast(s->ep, s->in, 1, NULL, s->group, s->addr[1], FI_UINT64,
					       FI_SEND, NULL), -FI_EINVAL);
}

static void sets(struct side *s)
{
	struct fi_av_set_attr attr = {
		.start_addr = 0, .end_addr = N - 1, .stride = 1,
	};
	struct fi_av_set_attr two = { .start_addr = 1, .end_addr = 3, .stride = 2 };
	struct fid_av_set *a, *b;
	must("fi_av_set", fi_av_set(s->av, &attr, &a, NULL));
	must("fi_av_set", fi_av_set(s->av, &two, &b, NULL));
	expect("insert a member", fi_av_set_insert(a, 2), -FI_EINVAL);
	expect("diff", fi_av_set_diff(a, b), 0);
	expect("remove who is not there", fi_av_set_remove(a, 1), -FI_EINVAL);
	expect("union", fi_av_set_union(a, b), 0);
	expect("remove", fi_av_set_remove(a, 1), 0);
	expect("intersect", fi_av_set_intersect(b, a), 0);
	expect("remove who was cut off", fi_av_set_remove(b, 1), -FI_EINVAL);
	expect("close", fi_close(&a->fid), 0);
	expect("close", fi_close(&b->fid), 0);
}

static void join(void)
{
	struct fi_av_set_attr none = { .start_addr = FI_ADDR_NOTAVAIL, .end_addr = FI_ADDR_NOTAVAIL };
	for (int i = 0; i < N; i++) {
		struct side *s = &sides[i];
		fi_addr_t coll;
		must("fi_av_set", fi_av_set(s->av, &none, &s->set, NULL));
		for (int k = N - 1; k >= 0; k--)
			must("fi_av_set_insert", fi_av_set_insert(s->set, s->addr[k]));
		must("fi_av_set_addr", fi_av_set_addr(s->set, &coll));
		must("fi_join_collective", fi_join_collective(s->ep, coll, s->set, 0, &s->mc, s));
	}
	for (int i = 0; i < N; i++) {
		struct fi_eq_entry e = { 0 };
		uint32_t event = 77;
		time_t end = time(NULL) + 20;
		ssize_t n;
		while ((n = fi_eq_read(sides[i].eq, &event, &e, sizeof e, 0)) == -FI_EAGAIN &&
		       time(NULL) < end)
			progress();
		expect("the length of the event", n, sizeof e);
		expect("FI_JOIN_COMPLETE", event, FI_JOIN_COMPLETE);
		expect("its fid", e.fid == &sides[i].mc->fid, 1);
		expect("its context", e.context == &sides[i], 1);
		sides[i].group = fi_mc_addr(sides[i].mc);
	}
}

/*
 * libfabric's own hooks wrap every object and have no collectives in their tables, so that a domain
 * that was asked for FI_COLLECTIVE opens and works, and the calls are refused.
 */
static int hooked(struct side *s)
{
	struct fi_av_set_attr all = { .start_addr = 0, .end_addr = 0, .stride = 1 };
	char name[64];
	size_t len = sizeof name;
	must("fi_getname", fi_getname(&s->ep->fid, name, &len));
	expect("fi_av_insert", fi_av_insert(s->av, name, 1, &s->addr[0], 0, NULL), 1);
	int ret = fi_av_set(s->av, &all, &s->set, NULL);
	expect("fi_av_set", ret == 0 || ret == -FI_ENOSYS, 1);
	printf("ok end\n");
	return wrong != 0;
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	hints->caps = FI_COLLECTIVE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	expect("FI_COLLECTIVE is granted", (info->caps & FI_COLLECTIVE) != 0, 1);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	for (int i = 0; i < N; i++)
		start(&sides[i], info);
	if (getenv("FI_HOOK"))
		return hooked(&sides[0]);
	for (int i = 0; i < N; i++) {
		for (int k = 0; k < N; k++)
			sides[i].addr[k] = known(sides[i].av, sides[k].ep);
	}
	sets(&sides[0]);
	join();
	operations();
	queries();
	for (int i = 0; i < N; i++) {
		expect("close mc", fi_close(&sides[i].mc->fid), 0);
		expect("close set", fi_close(&sides[i].set->fid), 0);
	}
	printf("ok end\n");
	return wrong != 0;
}
