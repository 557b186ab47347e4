/*
 * Scalable endpoints through the headers that are installed: one in each of two domains, whose
 * contexts send to each other by name. One line for each check: "ok NAME" or "BAD NAME: got X, want
 * Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

enum { TX = 3, RX = 4, BITS = 3, SECONDS = 60, LONG = 100000 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_ep *sep, *tx[TX], *rx[RX];
	/* Nothing is bound to the last one: to read it turns the loop. */
	struct fid_cq *tx_cq[TX], *rx_cq[RX], *idle;
	fi_addr_t peer;
};

static struct fid_fabric *fabric;
static struct fi_info *info;
static struct side a, b;
static char in[RX][LONG], out[LONG];
static uint64_t word[2] = { 40, 41 };

static struct fid_cq *open_cq(struct side *s)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = 64 };
	struct fid_cq *made;
	must("fi_cq_open", fi_cq_open(s->domain, &attr, &made, NULL));
	return made;
}

static void open_tx(struct side *s, int i)
{
	must("fi_tx_context", fi_tx_context(s->sep, i, NULL, &s->tx[i], NULL));
	must("bind cq", fi_ep_bind(s->tx[i], &s->tx_cq[i]->fid, FI_TRANSMIT));
	must("fi_enable", fi_enable(s->tx[i]));
}

static void open_rx(struct side *s, int i)
{
	must("fi_rx_context", fi_rx_context(s->sep, i, NULL, &s->rx[i], NULL));
	must("bind cq", fi_ep_bind(s->rx[i], &s->rx_cq[i]->fid, FI_RECV));
	must("fi_enable", fi_enable(s->rx[i]));
}

/* All but the last receive context. */
static void open_side(struct side *s)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE, .rx_ctx_bits = BITS };
	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_scalable_ep", fi_scalable_ep(s->domain, info, &s->sep, s));
	expect("its own context", s->sep->fid.context == s, 1);
	expect("its class", (long) s->sep->fid.fclass, FI_CLASS_SEP);
	expect("fi_enable without a vector", fi_enable(s->sep), -FI_ENOAV);
	must("fi_scalable_ep_bind", fi_scalable_ep_bind(s->sep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->sep));
	s->idle = open_cq(s);
	for (int i = 0; i < TX; i++) {
		s->tx_cq[i] = open_cq(s);
		open_tx(s, i);
	}
	for (int i = 0; i < RX; i++) {
		s->rx_cq[i] = open_cq(s);
		if (i < RX - 1)
			open_rx(s, i);
	}
}

/* The next completion of `cq`: 0, or its error. */
static int next(struct fid_cq *cq, struct fi_cq_tagged_entry *e, fi_addr_t *src)
{
	double end = now() + SECONDS;
	struct fi_cq_tagged_entry none;
	ssize_t n;
	while ((n = fi_cq_readfrom(cq, e, 1, src)) != 1) {
		struct fi_cq_err_entry err = { 0 };
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(cq, &err, 0));
			return err.err;
		}
		fi_cq_read(a.idle, &none, 1);
		fi_cq_read(b.idle, &none, 1);
		if (now() > end) {
			printf("BAD no completion\n");
			exit(1);
		}
	}
	return 0;
}

static void fill(size_t len, int seed)
{
	for (size_t k = 0; k < len; k++)
		out[k] = (char) (k * 3 + (size_t) seed);
}

static void messages(void)
{
	size_t lens[] = { 0, 8, 3000, LONG };
	struct fi_cq_tagged_entry e;
	fi_addr_t src;
	for (size_t l = 0; l < sizeof lens / sizeof *lens; l++) {
		for (int t = 0; t < TX; t++) {
			for (int r = 0; r < RX - 1; r++) {
				fi_addr_t to = fi_rx_addr(a.peer, r, BITS);
				int tagged = (t + r) % 2;
				fill(lens[l], t + 10 * r);
				memset(in[r], 0, LONG);
				if (tagged) {
					must("fi_tsend", fi_tsend(a.tx[t], out, lens[l], NULL, to, 7, in));
					must("fi_trecv", fi_trecv(b.rx[r], in[r], LONG, NULL, b.peer, 7, 0,
								  in[r]));
				} else {
					must("fi_recv", fi_recv(b.rx[r], in[r], LONG, NULL,
								fi_rx_addr(b.peer, 2, BITS), in[r]));
					must("fi_send", fi_send(a.tx[t], out, lens[l], NULL, to, in));
				}
				expect("the named context gets it", next(b.rx_cq[r], &e, &src), 0);
				expect("its receive", e.op_context == in[r] && e.len == lens[l]
					       && !memcmp(in[r], out, lens[l]), 1);
				expect("its sender", (long) src, (long) b.peer);
				expect("sent", next(a.tx_cq[t], &e, &src) || e.op_context != in, 0);
			}
		}
	}
	/* Without a name: the first one's. */
	must("fi_recv", fi_recv(a.rx[0], in[0], LONG, NULL, FI_ADDR_UNSPEC, in[0]));
	must("fi_inject", fi_inject(b.tx[2], "back", 5, b.peer));
	expect("the first context", next(a.rx_cq[0], &e, &src) || strcmp(in[0], "back"), 0);
}

static void one_sided(void)
{
	struct fi_cq_tagged_entry e;
	struct fid_mr *mr;
	fi_addr_t to = fi_rx_addr(a.peer, 1, BITS), src;
	uint64_t one = 1, old = 0;
	must("fi_mr_reg", fi_mr_reg(b.domain, word, sizeof word, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 5,
				    0, &mr, NULL));
	must("fi_write", fi_write(a.tx[1], &one, 8, NULL, to, 0, 5, NULL));
	expect("written", next(a.tx_cq[1], &e, &src), 0);
	must("fi_fetch_atomic", fi_fetch_atomic(a.tx[2], &one, 1, NULL, &old, NULL, to, 8, 5,
						FI_UINT64, FI_SUM, NULL));
	expect("fetched", next(a.tx_cq[2], &e, &src), 0);
	expect("the old value", (long) old, 41);
	must("fi_read", fi_read(a.tx[0], &old, 8, NULL, to, 8, 5, NULL));
	expect("read", next(a.tx_cq[0], &e, &src), 0);
	expect("the new value", (long) old, 42);
	expect("what was written", (long) word[0], 1);
	must("close", fi_close(&mr->fid));
}

static void refusals(void)
{
	struct fi_tx_attr tx = { .caps = FI_TAGGED, .size = 5 };
	struct fi_rx_attr rx = { .caps = FI_COLLECTIVE };
	struct fi_av_attr av = { .rx_ctx_bits = 17 };
	struct iovec iov = { out, 8 };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .tag = 1 };
	struct fi_cq_tagged_entry e;
	struct fid_ep *made;
	struct fid_av *none;
	fi_addr_t src;
	char name[64], other[64];
	size_t len = sizeof name;
	expect("fi_send on the endpoint", fi_send(a.sep, out, 8, NULL, a.peer, NULL), -FI_ENOSYS);
	expect("fi_recv on a transmit context", fi_recv(a.tx[0], in, 8, NULL, 0, NULL),
	       -FI_EOPNOTSUPP);
	expect("fi_send on a receive context", fi_send(a.rx[0], in, 8, NULL, a.peer, NULL),
	       -FI_EOPNOTSUPP);
	expect("a context that is not there", fi_tx_context(a.sep, TX, NULL, &made, NULL), -FI_EINVAL);
	expect("nor this", fi_rx_context(a.sep, RX, NULL, &made, NULL), -FI_EINVAL);
	expect("nor this", fi_rx_context(a.sep, -1, NULL, &made, NULL), -FI_EINVAL);
	expect("one that is open", fi_tx_context(a.sep, 0, NULL, &made, NULL), -FI_EBUSY);
	expect("and this", fi_rx_context(a.sep, 0, NULL, &made, NULL), -FI_EBUSY);
	expect("more than there is", fi_rx_context(a.sep, RX - 1, &rx, &made, NULL), -FI_EOPNOTSUPP);
	expect("another vector", fi_scalable_ep_bind(a.sep, &a.av->fid, 0), -FI_EOPBADSTATE);
	expect("a queue", fi_scalable_ep_bind(a.sep, &a.tx_cq[0]->fid, 0), -FI_EINVAL);
	expect("fi_enable again", fi_enable(a.sep), -FI_EOPBADSTATE);
	expect("bits", fi_av_open(a.domain, &av, &none, NULL), -FI_EINVAL);
	expect("an ordinary endpoint", fi_endpoint(a.domain, info, &made, NULL), -FI_EINVAL);
	expect("close with contexts", fi_close(&a.sep->fid), -FI_EBUSY);
	expect("close the vector", fi_close(&a.av->fid), -FI_EBUSY);
	/* The one name, and what a context has of its own. */
	must("fi_getname", fi_getname(&a.sep->fid, name, &len));
	must("fi_getname", fi_getname(&a.rx[1]->fid, other, &len));
	expect("a context has the name", memcmp(name, other, len), 0);
	must("close", fi_close(&a.tx[0]->fid));
	must("fi_tx_context", fi_tx_context(a.sep, 0, &tx, &a.tx[0], NULL));
	expect("what it got", (tx.caps & (FI_MSG | FI_TAGGED | FI_SEND | FI_RECV)) == (FI_TAGGED | FI_SEND)
		       && tx.size == 5 && tx.inject_size == info->tx_attr->inject_size, 1);
	expect("fi_enable without a queue", fi_enable(a.tx[0]), -FI_ENOCQ);
	must("bind cq", fi_ep_bind(a.tx[0], &a.tx_cq[0]->fid, FI_TRANSMIT));
	expect("and then with one", fi_enable(a.tx[0]), 0);
	expect("fi_send without FI_MSG", fi_send(a.tx[0], out, 8, NULL, a.peer, NULL), -FI_EOPNOTSUPP);
	/* To a context that is not open, and when it is. */
	fi_addr_t last = fi_rx_addr(a.peer, RX - 1, BITS);
	msg.addr = last;
	must("fi_tsendmsg", fi_tsendmsg(a.tx[0], &msg, FI_DELIVERY_COMPLETE));
	expect("a message to nobody", next(a.tx_cq[0], &e, &src) != 0, 1);
	open_rx(&b, RX - 1);
	must("fi_trecv", fi_trecv(b.rx[RX - 1], in[0], 8, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	must("fi_tsend", fi_tsend(a.tx[0], out, 8, NULL, last, 1, NULL));
	expect("now it is there", next(b.rx_cq[RX - 1], &e, &src), 0);
	expect("an address that is not there",
	       fi_tsend(a.tx[0], out, 8, NULL, fi_rx_addr(a.peer + 1, 1, BITS), 1, NULL), -FI_EINVAL);
}

/* Numbers of contexts that are closed are nobody else's. */
static void closing(void)
{
	struct fi_info *plain = fi_dupinfo(info);
	struct fid_ep *other;
	char name[64];
	size_t len = sizeof name;
	plain->ep_attr->tx_ctx_cnt = plain->ep_attr->rx_ctx_cnt = 1;
	must("close", fi_close(&b.rx[1]->fid));
	must("fi_endpoint", fi_endpoint(b.domain, plain, &other, NULL));
	must("fi_getname", fi_getname(&other->fid, name, &len));
	expect("a number of its own", name[6] >= RX, 1);
	must("close", fi_close(&other->fid));
	fi_freeinfo(plain);
	open_rx(&b, 1);
	for (struct side *s = &a; s; s = s == &a ? &b : NULL) {
		for (int i = 0; i < TX; i++) {
			must("close", fi_close(&s->tx[i]->fid));
			must("close", fi_close(&s->tx_cq[i]->fid));
		}
		for (int i = 0; i < RX; i++) {
			if (s->rx[i])
				must("close", fi_close(&s->rx[i]->fid));
			must("close", fi_close(&s->rx_cq[i]->fid));
		}
		must("close", fi_close(&s->idle->fid));
		expect("close", fi_close(&s->sep->fid), 0);
		expect("close again", fi_close(&s->sep->fid), -FI_EBADF);
		expect("close its vector", fi_close(&s->av->fid), 0);
		expect("close its domain", fi_close(&s->domain->fid), 0);
	}
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_DIRECTED_RECV | FI_SOURCE
		| FI_NAMED_RX_CTX;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->tx_ctx_cnt = TX;
	hints->ep_attr->rx_ctx_cnt = RX;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	expect("the answer has as many", info->ep_attr->tx_ctx_cnt == TX
		       && info->ep_attr->rx_ctx_cnt == RX, 1);
	expect("and can name them", !!(info->caps & info->tx_attr->caps & FI_NAMED_RX_CTX)
		       && !(info->rx_attr->caps & FI_NAMED_RX_CTX), 1);
	expect("there can be more", info->domain_attr->max_ep_tx_ctx >= TX
		       && info->domain_attr->max_ep_rx_ctx >= RX, 1);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	open_side(&a);
	open_side(&b);
	a.peer = known(a.av, b.sep);
	b.peer = known(b.av, a.sep);
	messages();
	one_sided();
	refusals();
	closing();
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(hints);
	fi_freeinfo(info);
	printf("ok end\n");
	return 0;
}
