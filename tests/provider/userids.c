/*
 * FI_AV_USER_ID: what the user calls an address is what completions call its sender, and data calls
 * take the address as before.
 */
#include <string.h>

#include <rdma/fi_tagged.h>

#include "check.h"

/* What 1.20 appended to the table of address vectors. */
struct ops_av {
	size_t size;
	void *before[9];
	int (*set_user_id)(struct fid_av *av, fi_addr_t addr, fi_addr_t id, uint64_t flags);
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;

struct side {
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	char name[16];
};

static int set_user_id(struct fid_av *av, fi_addr_t addr, fi_addr_t id, uint64_t flags)
{
	return ((struct ops_av *) av->ops)->set_user_id(av, addr, id, flags);
}

static void open_side(struct side *s, uint64_t av_flags)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE, .flags = av_flags };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	size_t len = sizeof s->name;

	must("fi_av_open", fi_av_open(domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq, &s->cq, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
	must("fi_getname", fi_getname(&s->ep->fid, s->name, &len));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
}

/* The source of a message of `len` bytes from `a` to `b`, which names the source `from`. */
static fi_addr_t source_of(struct side *a, fi_addr_t to, struct side *b, fi_addr_t from, size_t len)
{
	static char out[100000], in[100000];
	struct fi_cq_tagged_entry entry;
	fi_addr_t src = 77;
	int got = 0;

	must("fi_trecv", fi_trecv(b->ep, in, sizeof in, NULL, from, 1, 0, NULL));
	must("fi_tsend", fi_tsend(a->ep, out, len, NULL, to, 1, NULL));
	for (double end = now() + 20; got != 3 && now() < end;) {
		if (fi_cq_read(a->cq, &entry, 1) == 1)
			got |= 1;
		if (fi_cq_readfrom(b->cq, &entry, 1, &src) == 1)
			got |= 2;
	}
	expect("both ends", got, 3);
	return src;
}

/* Each of the ways in which a message of that length comes. */
static void named(const char *what, struct side *a, fi_addr_t to, struct side *b, fi_addr_t from,
		  fi_addr_t want)
{
	static const size_t lens[] = { 0, 8, 8, 5000, 80000 };

	for (int i = 0; i < 5; i++) {
		expect(what, source_of(a, to, b, FI_ADDR_UNSPEC, lens[i]) == want, 1);
		expect(what, source_of(a, to, b, from, lens[i]) == want, 1);
	}
}

/* What a peek calls the sender. */
static fi_addr_t peeked(struct side *a, fi_addr_t to, struct side *b, char *in)
{
	struct fi_msg_tagged msg = { .addr = FI_ADDR_UNSPEC, .tag = 2 };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e = { 0 };
	fi_addr_t src = 77;

	must("fi_tinject", fi_tinject(a->ep, "peek", 4, to, 2));
	for (double end = now() + 20; now() < end;) {
		int n;
		must("peek", fi_trecvmsg(b->ep, &msg, FI_PEEK));
		while ((n = fi_cq_readfrom(b->cq, &entry, 1, &src)) == -FI_EAGAIN)
			fi_cq_read(a->cq, &entry, 0);
		if (n == 1)
			break;
		must("fi_cq_readerr", fi_cq_readerr(b->cq, &e, 0));
	}
	must("fi_trecv", fi_trecv(b->ep, in, 8, NULL, FI_ADDR_UNSPEC, 2, 0, NULL));
	while (fi_cq_read(b->cq, &entry, 1) == -FI_EAGAIN)
		;
	return src;
}

static void by_the_vector(void)
{
	struct side a = { 0 }, b = { 0 };
	fi_addr_t to, from, again, old, long_id = 0xdeadbeefcafe0123;
	char in[8];

	open_side(&a, 0);
	open_side(&b, FI_AV_USER_ID);
	to = known(a.av, b.ep);
	from = known(b.av, a.ep);
	expect("an index is an index", from, 0);
	named("nobody named it", &a, to, &b, from, FI_ADDR_NOTAVAIL);
	must("set_user_id", set_user_id(b.av, from, 4711, 0));
	named("a name", &a, to, &b, from, 4711);
	must("set_user_id", set_user_id(b.av, from, long_id, 0));
	named("a long name", &a, to, &b, from, long_id);
	expect("a peek has it", peeked(&a, to, &b, in) == long_id, 1);
	/* The two that are next to what no index reaches. */
	must("set_user_id", set_user_id(b.av, from, 0xfffffffe, 0));
	expect("a name", source_of(&a, to, &b, from, 8) == 0xfffffffe, 1);
	must("set_user_id", set_user_id(b.av, from, 0xffffffff, 0));
	expect("a name", source_of(&a, to, &b, from, 8) == 0xffffffff, 1);

	expect("no such index", set_user_id(b.av, from + 1, 1, 0), -FI_EINVAL);
	expect("no index", set_user_id(b.av, FI_ADDR_NOTAVAIL, 1, 0), -FI_EINVAL);
	expect("a flag that is none", set_user_id(b.av, from, 1, 1), -FI_EBADFLAGS);
	expect("of a key where there are none", set_user_id(b.av, from, 1, 1ULL << 57), -FI_EINVAL);
	expect("a vector without", set_user_id(a.av, to, 1, 0), -FI_EINVAL);
	again = 5;
	expect("both ways at once", fi_av_insert(b.av, a.name, 1, &again, FI_AV_USER_ID, NULL),
	       -FI_EINVAL);

	must("fi_av_remove", fi_av_remove(b.av, &from, 1, 0));
	old = from;
	from = known(b.av, a.ep);
	expect("the index again", from == old, 1);
	named("the name went with the address", &a, to, &b, from, FI_ADDR_NOTAVAIL);
	must("fi_av_remove", fi_av_remove(b.av, &from, 1, 0));
	from = known(b.av, a.ep);
	for (fi_addr_t id = 20; id < 25; id++) {
		must("set_user_id", set_user_id(b.av, from, id, 0));
		expect("another name", source_of(&a, to, &b, from, 8) == id, 1);
	}
	close_side(&a);
	close_side(&b);
}

static void by_insertion(void)
{
	struct side a = { 0 }, b = { 0 }, c = { 0 };
	char both[32];
	fi_addr_t to_a, to_b, ids[2] = { 1ULL << 60, 3 };
	int status[2] = { 9, 9 };

	open_side(&a, 0);
	open_side(&b, 0);
	open_side(&c, 0);
	memcpy(both, a.name, 16);
	memcpy(both + 16, c.name, 16);
	must("fi_av_insert",
	     fi_av_insert(b.av, both, 2, ids, FI_AV_USER_ID | FI_SYNC_ERR, status) - 2);
	expect("indexes come back", ids[0] == 0 && ids[1] == 1 && !status[0] && !status[1], 1);
	expect("names without places", fi_av_insert(b.av, both, 1, NULL, FI_AV_USER_ID, NULL),
	       -FI_EINVAL);
	to_a = known(a.av, b.ep);
	to_b = known(c.av, b.ep);
	named("the first", &a, to_a, &b, ids[0], 1ULL << 60);
	named("the second", &c, to_b, &b, ids[1], 3);
	named("in others it is an index", &b, ids[0], &a, to_a, to_a);
	close_side(&a);
	close_side(&b);
	close_side(&c);
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV | FI_AV_USER_ID;
	hints->domain_attr->caps = FI_AV_USER_ID;
	hints->ep_attr->type = FI_EP_RDM;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	expect("the capability", !!(info->caps & FI_AV_USER_ID), 1);
	expect("the domain's", !!(info->domain_attr->caps & FI_AV_USER_ID), 1);
	expect("no context's", (info->tx_attr->caps | info->rx_attr->caps) & FI_AV_USER_ID, 0);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	by_the_vector();
	by_insertion();
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	hints->caps = FI_TAGGED;
	hints->domain_attr->caps = 0;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	expect("nobody asked", info->caps & FI_AV_USER_ID, 0);
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf("ok end\n");
	return bad != 0;
}
