/*
 * Calls at the edges of what libfabric's manuals say, in a domain with few operations and receives
 * (FI_BAREWIRE_TX_MAX and FI_BAREWIRE_RX_MAX). One line for each check: "ok NAME" or "BAD NAME: got
 * X, want Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

#include "check.h"

enum { TX_MAX = 16, RX_MAX = 32, REGIONS = 65536 + 100 };

struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t self;
};

static struct fi_info *hints_for(uint64_t caps)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = caps;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	return hints;
}

static void open_domain(struct side *s, uint32_t version, struct fi_info *hints)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av = { .type = FI_AV_TABLE };

	must("fi_getinfo", fi_getinfo(version, NULL, NULL, 0, hints, &s->info));
	fi_freeinfo(hints);
	must("fi_fabric", fi_fabric(s->info->fabric_attr, &s->fabric, NULL));
	must("fi_domain", fi_domain(s->fabric, s->info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
}

static void open_ep(struct side *s)
{
	must("fi_endpoint", fi_endpoint(s->domain, s->info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void open_side(struct side *s, uint32_t version, struct fi_info *hints)
{
	open_domain(s, version, hints);
	open_ep(s);
	s->self = known(s->av, s->ep);
}

static void close_side(struct side *s)
{
	if (s->ep)
		must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
	must("close", fi_close(&s->fabric->fid));
	fi_freeinfo(s->info);
}

/* The next entry of a receive: its flags, or the error as a negative number. */
static long received(struct side *s, struct fi_cq_tagged_entry *e)
{
	struct fi_cq_err_entry err = { 0 };
	double end = now() + 5;
	ssize_t n;

	do {
		n = fi_cq_read(s->cq, e, 1);
		if (n == 1 && e->flags & FI_RECV)
			return (long) e->flags;
		if (n == -FI_EAVAIL && fi_cq_readerr(s->cq, &err, 0) == 1)
			return -err.err;
	} while ((n == 1 || n == -FI_EAGAIN) && now() < end);
	return n;
}

static ssize_t ask(struct side *s, uint64_t tag, void *to, size_t len, uint64_t flags)
{
	struct iovec one = { to, len };
	struct fi_msg_tagged m = { .msg_iov = &one, .iov_count = 1, .addr = FI_ADDR_UNSPEC,
				   .tag = tag, .context = s };

	return fi_trecvmsg(s->ep, &m, flags);
}

/* Peeks and claims while every place of the receive queue is taken by receives of other messages. */
static void peeks(void)
{
	static char others[RX_MAX + 1][8], in[8];
	struct side s = { 0 };
	struct fi_cq_tagged_entry e;
	struct fid_cntr *cntr;
	long posted = 0;

	open_side(&s, fi_version(), hints_for(FI_TAGGED));
	must("fi_cntr_open", fi_cntr_open(s.domain, NULL, &cntr, NULL));
	must("bind", fi_ep_bind(s.ep, &cntr->fid, FI_RECV));
	while (fi_trecv(s.ep, others[posted], 8, NULL, FI_ADDR_UNSPEC, 1, 0, others[posted]) == 0)
		posted++;
	expect("receives", posted, RX_MAX);
	expect("one more", fi_trecv(s.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL), -FI_EAGAIN);
	expect("a peek in a full queue", ask(&s, 2, NULL, 0, FI_PEEK), 0);
	expect("finds nothing", received(&s, &e), -FI_ENOMSG);
	expect("which is no failure", fi_cntr_readerr(cntr), 0);
	must("fi_tinject", fi_tinject(s.ep, "second", 7, s.self, 2));
	must("fi_tinject", fi_tinject(s.ep, "third", 6, s.self, 2));
	for (double end = now() + 5; now() < end;) {
		must("peek", ask(&s, 2, NULL, 0, FI_PEEK));
		if (received(&s, &e) > 0)
			break;
	}
	expect("a peek finds the message", e.len, 7);
	expect("a discard in a full queue", ask(&s, 2, NULL, 0, FI_PEEK | FI_DISCARD), 0);
	expect("discards it", received(&s, &e) > 0 && e.len == 7, 1);
	must("fi_cancel", fi_cancel(&s.ep->fid, others[0]));
	expect("a place is free", received(&s, &e), -FI_ECANCELED);
	expect("peek and claim", ask(&s, 2, NULL, 0, FI_PEEK | FI_CLAIM), 0);
	expect("claims the next", received(&s, &e) > 0 && e.len == 6, 1);
	must("fi_trecv", fi_trecv(s.ep, others[0], 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	expect("a discard of a claim", ask(&s, 2, in, 8, FI_CLAIM | FI_DISCARD), 0);
	expect("discards it", received(&s, &e) > 0 && e.len == 6, 1);
	must("fi_tinject", fi_tinject(s.ep, "first", 6, s.self, 1));
	expect("the receives are as before", received(&s, &e) > 0 && e.len == 6, 1);
	expect("which alone is counted", fi_cntr_read(cntr), 1);
	must("close", fi_close(&s.ep->fid));
	s.ep = NULL;
	must("close", fi_close(&cntr->fid));
	close_side(&s);
}

/* The same of an endpoint whose queue is shorter than what its domain has. */
static void claims(void)
{
	static char others[4][8], in[8];
	struct fi_info *hints = hints_for(FI_TAGGED);
	struct side s = { 0 };
	struct fi_cq_tagged_entry e;

	hints->rx_attr->size = 4;
	open_side(&s, fi_version(), hints);
	for (int i = 0; i < 4; i++)
		must("fi_trecv", fi_trecv(s.ep, others[i], 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	must("fi_tinject", fi_tinject(s.ep, "second", 7, s.self, 2));
	for (double end = now() + 5; now() < end;) {
		must("peek and claim", ask(&s, 2, NULL, 0, FI_PEEK | FI_CLAIM));
		if (received(&s, &e) > 0)
			break;
	}
	expect("a claim in a full queue", ask(&s, 2, in, 8, FI_CLAIM), 0);
	expect("receives the message", received(&s, &e) > 0 && !strcmp(in, "second"), 1);
	expect("one more", fi_trecv(s.ep, in, 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL), -FI_EAGAIN);
	close_side(&s);
}

/* FI_MULTI_RECV among the default flags is for untagged receives: before 2.0 no tagged one has it. */
static void defaults(void)
{
	static char multi[64], tagged[2][8];
	struct fi_info *hints = hints_for(FI_MSG | FI_TAGGED);
	struct side s = { 0 };
	struct fi_cq_tagged_entry e;
	struct fid_ep *srx;
	size_t min = 40;

	hints->rx_attr->op_flags = FI_MULTI_RECV;
	open_side(&s, FI_VERSION(1, 17), hints);
	must("fi_setopt", fi_setopt(&s.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min,
				    sizeof min));
	expect("fi_trecv", fi_trecv(s.ep, tagged[0], 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL), 0);
	expect("fi_trecv", fi_trecv(s.ep, tagged[1], 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL), 0);
	expect("fi_trecvmsg with the flag", ask(&s, 1, tagged[1], 8, FI_MULTI_RECV), -FI_EBADFLAGS);
	expect("fi_recv", fi_recv(s.ep, multi, sizeof multi, NULL, FI_ADDR_UNSPEC, NULL), 0);
	for (int i = 0; i < 2; i++) {
		must("fi_tinject", fi_tinject(s.ep, i ? "b" : "a", 2, s.self, 1));
		expect("a tagged message", received(&s, &e), FI_RECV | FI_TAGGED);
		expect("in a receive of its own", tagged[i][0], "ab"[i]);
		must("fi_inject", fi_inject(s.ep, "twelve bytes", 13, s.self));
		expect("an untagged message, the second of which leaves too little",
		       received(&s, &e), FI_RECV | FI_MSG | (i ? FI_MULTI_RECV : 0));
		expect("behind the first", (char *) e.buf - multi, 13 * i);
	}
	expect("fi_srx_context, which has none", fi_srx_context(s.domain, s.info->rx_attr, &srx, NULL),
	       -FI_EBADFLAGS);
	close_side(&s);
}

/* A size of 0 is as many as there usually are, or as the domain has. */
static void sizes(void)
{
	struct fi_tx_attr tx = { 0 };
	struct fi_rx_attr rx = { 0 };
	struct side s = { 0 };
	struct fid_ep *ep, *of_sep;
	size_t size = 0, len = sizeof size;

	open_domain(&s, fi_version(), hints_for(FI_MSG));
	expect("sends of an answer", s.info->tx_attr->size, TX_MAX);
	expect("receives of an answer", s.info->rx_attr->size, RX_MAX);
	s.info->tx_attr->size = s.info->rx_attr->size = 0;
	expect("fi_endpoint", fi_endpoint(s.domain, s.info, &ep, NULL), 0);
	must("fi_getopt", fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 6 /* FI_OPT_TX_SIZE */, &size, &len));
	expect("sends", size, TX_MAX);
	must("fi_getopt", fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 7 /* FI_OPT_RX_SIZE */, &size, &len));
	expect("receives", size, RX_MAX);
	must("close", fi_close(&ep->fid));
	expect("fi_scalable_ep", fi_scalable_ep(s.domain, s.info, &ep, NULL), 0);
	must("fi_tx_context", fi_tx_context(ep, 0, &tx, &of_sep, NULL));
	must("close", fi_close(&of_sep->fid));
	must("fi_rx_context", fi_rx_context(ep, 0, &rx, &of_sep, NULL));
	must("close", fi_close(&of_sep->fid));
	expect("sends of a context", tx.size, TX_MAX);
	expect("no bit of the receive side", tx.caps & (FI_RECV | FI_MULTI_RECV), 0);
	expect("no bit of the other", rx.caps & (FI_SEND | FI_FENCE), 0);
	expect("receives of a context", rx.size, RX_MAX);
	must("close", fi_close(&ep->fid));
	rx = (struct fi_rx_attr) { 0 };
	expect("fi_srx_context", fi_srx_context(s.domain, &rx, &ep, NULL), 0);
	must("fi_getopt", fi_getopt(&ep->fid, FI_OPT_ENDPOINT, 7, &size, &len));
	expect("receives of a shared context", size, RX_MAX);
	must("close", fi_close(&ep->fid));
	close_side(&s);
}

/* A domain has room for the regions that it is asked for, and an answer tells how many. */
static void regions(void)
{
	static struct fid_mr *all[REGIONS];
	static char memory[REGIONS];
	struct fi_info *hints = hints_for(FI_RMA), *none = NULL;
	struct side s = { 0 };
	long count = 0, ret = 0;

	hints->domain_attr->mr_cnt = (1 << 20) + 1;
	expect("too many regions", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &none),
	       -FI_ENODATA);
	hints->domain_attr->mr_cnt = 7;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &none));
	expect("as many as there usually are", none->domain_attr->mr_cnt, 65536);
	fi_freeinfo(none);
	hints->domain_attr->mr_cnt = REGIONS;
	open_domain(&s, fi_version(), hints);
	expect("as many as asked for", s.info->domain_attr->mr_cnt, REGIONS);
	while (count < REGIONS && ret == 0) {
		ret = fi_mr_reg(s.domain, memory + count, 1, FI_REMOTE_READ, 0, (uint64_t) count, 0,
				&all[count], NULL);
		count += ret == 0;
	}
	expect("fi_mr_reg", ret, 0);
	expect("a domain with a region", fi_close(&s.domain->fid), -FI_EBUSY);
	while (count > 0)
		must("close", fi_close(&all[--count]->fid));
	close_side(&s);
}

/* Before 1.5 an error entry has no length of its data: the provider lends it. */
static void strangers(void)
{
	struct fi_cq_err_entry err;
	struct side a = { 0 }, b = { 0 };
	char name[64], in[8], place[64];
	fi_addr_t at, again;
	size_t len = sizeof name;

	open_side(&a, FI_VERSION(1, 4), hints_for(FI_MSG | FI_SOURCE | FI_SOURCE_ERR));
	open_side(&b, fi_version(), hints_for(FI_MSG));
	must("fi_getname", fi_getname(&a.ep->fid, name, &len));
	expect("fi_av_insert", fi_av_insert(b.av, name, 1, &at, 0, NULL), 1);
	must("fi_recv", fi_recv(a.ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_inject", fi_inject(b.ep, "hello", 6, at));
	memset(&err, 0xee, sizeof err);
	err.err_data = place;
	memset(place, 0xee, sizeof place);
	for (double end = now() + 5; now() < end;) {
		struct fi_cq_tagged_entry e;
		fi_cq_read(b.cq, &e, 1);
		if (fi_cq_read(a.cq, &e, 1) == -FI_EAVAIL)
			break;
	}
	expect("fi_cq_readerr", fi_cq_readerr(a.cq, &err, 0), 1);
	expect("an unknown source", err.err, FI_EADDRNOTAVAIL);
	expect("its address is lent", err.err_data && err.err_data != place, 1);
	expect("nothing lies where the program has memory", place[0], (char) 0xee);
	expect("nor behind the entry of that time", err.err_data_size, 0xeeeeeeeeeeeeeeee);
	expect("fi_av_insert of it", fi_av_insert(a.av, err.err_data, 1, &again, 0, NULL), 1);
	len = sizeof name;
	must("fi_av_lookup", fi_av_lookup(a.av, again, place, &len));
	must("fi_getname", fi_getname(&b.ep->fid, name, &len));
	expect("it is the sender's", memcmp(place, name, len), 0);
	close_side(&a);
	close_side(&b);
}

/* Whether processes of this node are reached through memory is the port's to say. */
static void memory(void)
{
	const int option = 11 /* FI_OPT_SHARED_MEMORY_PERMITTED */;
	const struct { const char *port; int is; } ports[] = {
		{ NULL, 1 }, { "udp:127.0.0.1", 1 }, { "udp:127.0.0.1,near=no", 0 },
	};

	for (int i = 0; i < 3; i++) {
		struct fi_info *hints = hints_for(FI_MSG);
		struct side s = { 0 };
		unsigned char yes = 1, no = 0, is = 2;
		size_t len = 1;

		if (ports[i].port)
			hints->domain_attr->name = strdup(ports[i].port);
		open_side(&s, fi_version(), hints);
		expect("fi_getopt", fi_getopt(&s.ep->fid, FI_OPT_ENDPOINT, option, &is, &len), 0);
		expect("memory is used", is, ports[i].is);
		expect("it may be", fi_setopt(&s.ep->fid, FI_OPT_ENDPOINT, option, &yes, 1), 0);
		expect("it may not", fi_setopt(&s.ep->fid, FI_OPT_ENDPOINT, option, &no, 1),
		       ports[i].is ? -FI_EINVAL : 0);
		close_side(&s);
	}
}

int main(void)
{
	peeks();
	claims();
	defaults();
	sizes();
	regions();
	strangers();
	memory();
	printf("ok end\n");
	return bad != 0;
}
