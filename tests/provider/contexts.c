/*
 * Scalable endpoints of two processes: each sends to the receive contexts of the other by name,
 * reads, writes and changes its memory through them, and names contexts that the other has not got,
 * where another endpoint has the number. One line for each check: "ok NAME" or "BAD NAME: got X,
 * want Y".
 */
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

enum { TX = 2, RX = 3, BITS = 2, WIDE = 10, SECONDS = 60, LONG = 100000, KEY = 5 };

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av, *wide_av;
static struct fid_ep *sep, *tx[TX], *rx[RX], *neighbour, *wide_sep, *wide_tx;
/* Nothing is bound to the last one: to read it turns the loop. */
static struct fid_cq *tx_cq[TX], *rx_cq[RX], *neighbour_cq, *idle;
static struct fid_mr *mr;
static fi_addr_t peer, peer_wide, peer_neighbour;
static int to_peer, from_peer;
static char in[LONG], out[LONG], theirs[LONG];
static const char *who;

static struct fid_cq *open_cq(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = 64 };
	struct fid_cq *made;
	must("fi_cq_open", fi_cq_open(domain, &attr, &made, NULL));
	return made;
}

static struct fid_av *open_av(int bits)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE, .rx_ctx_bits = bits };
	struct fid_av *made;
	must("fi_av_open", fi_av_open(domain, &attr, &made, NULL));
	return made;
}

static struct fid_ep *open_sep(struct fi_info *info, struct fid_av *with)
{
	struct fid_ep *made;
	must("fi_scalable_ep", fi_scalable_ep(domain, info, &made, NULL));
	must("fi_scalable_ep_bind", fi_scalable_ep_bind(made, &with->fid, 0));
	must("fi_enable", fi_enable(made));
	return made;
}

static struct fid_ep *open_tx(struct fid_ep *of, int i, struct fid_cq *cq)
{
	struct fid_ep *made;
	must("fi_tx_context", fi_tx_context(of, i, NULL, &made, NULL));
	must("bind cq", fi_ep_bind(made, &cq->fid, FI_TRANSMIT));
	must("fi_enable", fi_enable(made));
	return made;
}

/* The one whose number follows those of the contexts. */
static void open_neighbour(struct fi_info *info)
{
	struct fi_info *plain = fi_dupinfo(info);
	plain->ep_attr->tx_ctx_cnt = plain->ep_attr->rx_ctx_cnt = 1;
	must("fi_endpoint", fi_endpoint(domain, plain, &neighbour, NULL));
	neighbour_cq = open_cq();
	must("bind cq", fi_ep_bind(neighbour, &neighbour_cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind av", fi_ep_bind(neighbour, &av->fid, 0));
	must("fi_enable", fi_enable(neighbour));
	fi_freeinfo(plain);
}

static void open_all(struct fi_info *info)
{
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	av = open_av(BITS);
	wide_av = open_av(WIDE);
	idle = open_cq();
	sep = open_sep(info, av);
	for (int i = 0; i < TX; i++) {
		tx_cq[i] = open_cq();
		tx[i] = open_tx(sep, i, tx_cq[i]);
	}
	for (int i = 0; i < RX; i++) {
		rx_cq[i] = open_cq();
		must("fi_rx_context", fi_rx_context(sep, i, NULL, &rx[i], NULL));
		must("bind cq", fi_ep_bind(rx[i], &rx_cq[i]->fid, FI_RECV));
		must("fi_enable", fi_enable(rx[i]));
	}
	open_neighbour(info);
	wide_sep = open_sep(info, wide_av);
	wide_tx = open_tx(wide_sep, 0, tx_cq[0]);
	must("fi_mr_reg", fi_mr_reg(domain, theirs, LONG, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0,
				    &mr, NULL));
	expect("bind a region to the endpoint", fi_mr_bind(mr, &sep->fid, 0), 0);
	expect("bind it to a transmit context", fi_mr_bind(mr, &tx[0]->fid, 0), -FI_EINVAL);
}

static void turn(void)
{
	struct fi_cq_tagged_entry none;
	fi_cq_read(idle, &none, 1);
}

/* Bytes from the other process, for which the loop turns. */
static void hear(void *to, size_t len)
{
	struct pollfd pipe = { .fd = from_peer, .events = POLLIN };
	double end = now() + SECONDS;
	while (poll(&pipe, 1, 0) == 0 && now() < end)
		turn();
	if (read(from_peer, to, len) != (ssize_t) len) {
		printf("BAD %s: the other process has gone\n", who);
		exit(1);
	}
}

static void say(const void *what, size_t len)
{
	if (write(to_peer, what, len) != (ssize_t) len)
		must("write", -1);
}

/* Both have come here. */
static void meet(void)
{
	char c = 'x';
	say(&c, 1);
	hear(&c, 1);
}

static fi_addr_t insert(struct fid_av *into, const char *name)
{
	fi_addr_t addr;
	must("fi_av_insert", fi_av_insert(into, name, 1, &addr, 0, NULL) - 1);
	return addr;
}

static void exchange(void)
{
	char names[2][64] = { { 0 } };
	size_t len = sizeof names[0];
	must("fi_getname", fi_getname(&sep->fid, names[0], &len));
	len = sizeof names[1];
	must("fi_getname", fi_getname(&neighbour->fid, names[1], &len));
	expect("the neighbour's number", names[1][6] - names[0][6], RX);
	say(names, sizeof names);
	hear(names, sizeof names);
	peer = insert(av, names[0]);
	peer_neighbour = insert(av, names[1]);
	peer_wide = insert(wide_av, names[0]);
}

/* The next completion of `cq`: 0, or its error. */
static int next(struct fid_cq *cq, struct fi_cq_tagged_entry *e)
{
	double end = now() + SECONDS;
	ssize_t n;
	while ((n = fi_cq_read(cq, e, 1)) != 1) {
		struct fi_cq_err_entry err = { 0 };
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(cq, &err, 0));
			return err.err;
		}
		turn();
		if (now() > end) {
			printf("BAD %s: no completion\n", who);
			exit(1);
		}
	}
	return 0;
}

static const size_t lens[] = { 0, 8, 300, 3000, LONG };
enum { LENS = sizeof lens / sizeof *lens };

static void fill(size_t len, int seed)
{
	for (size_t k = 0; k < len; k++)
		out[k] = (char) (k * 7 + (size_t) seed);
}

/* Every transmit context to every receive context: what both processes send is the same. */
static void messages(void)
{
	struct fi_cq_tagged_entry e;
	for (int l = 0; l < LENS; l++) {
		for (int t = 0; t < TX; t++) {
			for (int r = 0; r < RX; r++) {
				int tagged = (t + r + l) % 2;
				fill(lens[l], l + 10 * t + 30 * r);
				memset(in, 0, LONG);
				if (tagged)
					must("fi_trecv", fi_trecv(rx[r], in, LONG, NULL,
								  fi_rx_addr(peer, 0, BITS), 7, 0, in));
				else
					must("fi_recv", fi_recv(rx[r], in, LONG, NULL, FI_ADDR_UNSPEC, in));
				if (tagged)
					must("fi_tsend", fi_tsend(tx[t], out, lens[l], NULL,
								  fi_rx_addr(peer, r, BITS), 7, out));
				else
					must("fi_send", fi_send(tx[t], out, lens[l], NULL,
								fi_rx_addr(peer, r, BITS), out));
				expect("the named context gets it", next(rx_cq[r], &e), 0);
				expect("whole", e.op_context == in && e.len == lens[l]
					       && !memcmp(in, out, lens[l]), 1);
				expect("sent", next(tx_cq[t], &e) || e.op_context != out, 0);
				/* The other has read it too before the buffer is cleared. */
				meet();
			}
		}
	}
}

static void one_sided(void)
{
	struct fi_cq_tagged_entry e;
	uint64_t one = 1, old = 0;
	for (int l = 1; l < LENS; l++) {
		for (int r = 0; r < RX; r++) {
			fi_addr_t to = fi_rx_addr(peer, r, BITS);
			fill(lens[l], l + r);
			must("fi_write", fi_write(tx[r % TX], out, lens[l], NULL, to, 0, KEY, out));
			expect("written", next(tx_cq[r % TX], &e), 0);
			memset(in, 0, LONG);
			must("fi_read", fi_read(tx[r % TX], in, lens[l], NULL, to, 0, KEY, in));
			expect("read", next(tx_cq[r % TX], &e), 0);
			expect("what was written", memcmp(in, out, lens[l]), 0);
		}
	}
	must("fi_inject_write", fi_inject_write(tx[0], &one, 8, fi_rx_addr(peer, 1, BITS), 0, KEY));
	must("fi_fetch_atomic", fi_fetch_atomic(tx[0], &one, 1, NULL, &old, NULL,
						fi_rx_addr(peer, 2, BITS), 0, KEY, FI_UINT64, FI_SUM,
						NULL));
	expect("fetched", next(tx_cq[0], &e), 0);
	expect("the old value", (long) old, 1);
	must("fi_write", fi_write(tx[0], out, 8, NULL, peer_neighbour, 0, KEY, NULL));
	expect("not through another endpoint", next(tx_cq[0], &e), FI_EACCES);
	meet();
}

/* What names context `r` of the peer, of which there is none. */
static void nobody(fi_addr_t to)
{
	struct iovec iov = { out, 8 };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = to, .tag = 7 };
	struct fi_cq_tagged_entry e;
	uint64_t one = 1, old = 0;
	for (int l = 0; l < LENS; l++) {
		struct fi_msg plain = { .msg_iov = &iov, .iov_count = 1, .addr = to };
		iov.iov_len = lens[l];
		must("fi_tsendmsg", fi_tsendmsg(tx[0], &msg, FI_DELIVERY_COMPLETE));
		expect("fi_tsendmsg to nobody", next(tx_cq[0], &e), FI_ECONNREFUSED);
		must("fi_sendmsg", fi_sendmsg(tx[1], &plain, FI_DELIVERY_COMPLETE));
		expect("fi_sendmsg to nobody", next(tx_cq[1], &e), FI_ECONNREFUSED);
		/* A short one that does not wait for the target may have left well. */
		must("fi_tsend", fi_tsend(tx[0], out, lens[l], NULL, to, 7, NULL));
		next(tx_cq[0], &e);
		must("fi_write", fi_write(tx[0], out, lens[l], NULL, to, 0, KEY, NULL));
		expect("fi_write to nobody", next(tx_cq[0], &e), FI_ECONNREFUSED);
		must("fi_read", fi_read(tx[0], in, lens[l], NULL, to, 0, KEY, NULL));
		expect("fi_read from nobody", next(tx_cq[0], &e), FI_ECONNREFUSED);
	}
	iov.iov_len = 8;
	for (int i = 0; i < 3; i++)
		must("fi_tsendmsg", fi_tsendmsg(tx[0], &msg, FI_DELIVERY_COMPLETE | (i < 2 ? FI_MORE : 0)));
	for (int i = 0; i < 3; i++)
		expect("in one packet", next(tx_cq[0], &e), FI_ECONNREFUSED);
	/* Without an entry: the next one is that of the call behind it. */
	must("fi_inject_write", fi_inject_write(tx[0], out, 8, to, 0, KEY));
	must("fi_atomic", fi_atomic(tx[0], &one, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, NULL));
	expect("fi_atomic to nobody", next(tx_cq[0], &e), FI_ECONNREFUSED);
	must("fi_fetch_atomic", fi_fetch_atomic(tx[0], &one, 1, NULL, &old, NULL, to, 0, KEY, FI_UINT64,
						FI_SUM, NULL));
	expect("fi_fetch_atomic to nobody", next(tx_cq[0], &e), FI_ECONNREFUSED);
}

static void missing(void)
{
	struct fi_cq_tagged_entry e;
	must("fi_trecv", fi_trecv(neighbour, in, LONG, NULL, FI_ADDR_UNSPEC, 7, 0, in));
	must("fi_recv", fi_recv(neighbour, in, LONG, NULL, FI_ADDR_UNSPEC, out));
	meet();
	nobody(fi_rx_addr(peer, RX, BITS));
	/* An ordinary endpoint has none, though others have the numbers behind it. */
	nobody(fi_rx_addr(peer_neighbour, 1, BITS));
	/* No endpoint has so many. */
	expect("context 256", fi_tsend(wide_tx, out, 8, NULL, fi_rx_addr(peer_wide, 256, WIDE), 7, NULL),
	       -FI_EINVAL);
	must("fi_read", fi_read(wide_tx, in, 8, NULL, fi_rx_addr(peer_wide, 255, WIDE), 0, KEY, NULL));
	expect("context 255", next(tx_cq[0], &e), FI_ECONNREFUSED);
	meet();
	expect("the neighbour got nothing", fi_cq_read(neighbour_cq, &e, 1), -FI_EAGAIN);
	meet();
	must("fi_tsend", fi_tsend(tx[0], "you", 4, NULL, peer_neighbour, 7, NULL));
	expect("but what is for it", next(neighbour_cq, &e) || strcmp(in, "you"), 0);
	expect("sent", next(tx_cq[0], &e), 0);
	meet();
}

static void close_all(void)
{
	must("close", fi_close(&mr->fid));
	must("close", fi_close(&neighbour->fid));
	must("close", fi_close(&wide_tx->fid));
	must("close", fi_close(&wide_sep->fid));
	for (int i = 0; i < TX; i++)
		must("close", fi_close(&tx[i]->fid));
	for (int i = 0; i < RX; i++)
		must("close", fi_close(&rx[i]->fid));
	must("close", fi_close(&sep->fid));
	for (int i = 0; i < TX; i++)
		must("close", fi_close(&tx_cq[i]->fid));
	for (int i = 0; i < RX; i++)
		must("close", fi_close(&rx_cq[i]->fid));
	must("close", fi_close(&neighbour_cq->fid));
	must("close", fi_close(&idle->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&wide_av->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
}

int main(void)
{
	struct fi_info *hints, *info;
	int there[2], back[2], status = -1;
	pid_t child;
	must("pipe", pipe(there));
	must("pipe", pipe(back));
	child = fork();
	who = child ? "parent" : "child";
	to_peer = child ? there[1] : back[1];
	from_peer = child ? back[0] : there[0];
	close(child ? there[0] : there[1]);
	close(child ? back[1] : back[0]);
	hints = fi_allocinfo();
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_DIRECTED_RECV | FI_SOURCE
		| FI_NAMED_RX_CTX;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->tx_ctx_cnt = TX;
	hints->ep_attr->rx_ctx_cnt = RX;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	open_all(info);
	exchange();
	messages();
	one_sided();
	missing();
	meet();
	close_all();
	fi_freeinfo(hints);
	fi_freeinfo(info);
	if (!child)
		return 0;
	waitpid(child, &status, 0);
	expect("the other process", status, 0);
	printf("ok end\n");
	return 0;
}
