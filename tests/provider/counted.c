/*
 * Counters of bytes: what was sent, received, written and read, at both ends. Two domains in one
 * process; `a` does, `b` is done to.
 */
#include <string.h>

#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <rdma/fi_trigger.h>

#include "check.h"

#define LONG 300000
#define ALL (FI_REMOTE_READ | FI_REMOTE_WRITE)

/* enum fi_cntr_events of 2.0. */
#define BYTES ((enum fi_cntr_events) 1)

enum { KEY = 5 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	/* Of messages, writes and reads: at `a` what it does, at `b` what is done to it. */
	struct fid_cntr *msgs, *writes, *reads;
	fi_addr_t peer;
};

static struct fid_fabric *fabric;
static struct fi_info *info;
static struct side a, b;
static char out[LONG], in[LONG], region[LONG];

static struct fid_cntr *open_cntr(struct side *s, enum fi_cntr_events events)
{
	struct fi_cntr_attr attr = { .events = events };
	struct fid_cntr *made;
	must("fi_cntr_open", fi_cntr_open(s->domain, &attr, &made, NULL));
	return made;
}

static void open_side(struct side *s, uint64_t msgs, uint64_t writes, uint64_t reads)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_DATA };
	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	s->msgs = open_cntr(s, BYTES);
	s->writes = open_cntr(s, BYTES);
	s->reads = open_cntr(s, BYTES);
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->msgs->fid, msgs));
	must("bind", fi_ep_bind(s->ep, &s->writes->fid, writes));
	must("bind", fi_ep_bind(s->ep, &s->reads->fid, reads));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->msgs->fid));
	must("close", fi_close(&s->writes->fid));
	must("close", fi_close(&s->reads->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
}

/* The next entry of a side: 0 or its error. Both sides work meanwhile. */
static int next(struct side *s)
{
	struct side *other = s == &a ? &b : &a;
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry e = { 0 };
	for (double end = now() + 60; now() < end;) {
		ssize_t n = fi_cq_read(s->cq, &entry, 1);
		fi_cntr_read(other->msgs);
		if (n == 1)
			return 0;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
			return e.err;
		}
	}
	return FI_ETIMEDOUT;
}

/* A counter's value once it is `want`, or at the end of a second. */
static long value(struct fid_cntr *cntr, long want)
{
	for (double end = now() + 1; now() < end;) {
		fi_cntr_read(a.msgs), fi_cntr_read(b.msgs);
		if ((long) fi_cntr_read(cntr) == want)
			break;
	}
	return fi_cntr_read(cntr);
}

static void messages(void)
{
	static const size_t len[] = { 0, 1, 100, 5000, LONG };
	long sent = 0;
	for (int i = 0; i < 5; i++) {
		must("fi_trecv", fi_trecv(b.ep, in, LONG, NULL, b.peer, i, 0, NULL));
		must("fi_tsend", fi_tsend(a.ep, out, len[i], NULL, a.peer, i, NULL));
		expect("received", next(&b), 0);
		expect("sent", next(&a), 0);
		sent += len[i];
		expect("bytes sent", value(a.msgs, sent), sent);
		expect("bytes received", value(b.msgs, sent), sent);
	}
	must("fi_recv", fi_recv(b.ep, in, 10, NULL, b.peer, NULL));
	must("fi_inject", fi_inject(a.ep, out, 30, a.peer));
	expect("cut", next(&b), FI_ETRUNC);
	expect("bytes of an inject", value(a.msgs, sent + 30), sent + 30);
	expect("no bytes of what failed", value(b.msgs, sent), sent);
	expect("but a failure", fi_cntr_readerr(b.msgs), 1);
}

static void one_sided(void)
{
	static const size_t len[] = { 0, 8, 100, 5000, LONG };
	struct fid_cntr *written = open_cntr(&b, BYTES), *many = open_cntr(&b, 0);
	struct fi_msg_rma m = { .addr = a.peer };
	struct iovec iov = { out, 6000 };
	struct fi_rma_iov two[2] = { { 0, 5000, KEY }, { 10000, 1000, KEY } };
	struct fid_mr *mr;
	uint64_t operand[500] = { 0 }, old[500];
	long all = 0;

	must("fi_mr_reg", fi_mr_reg(b.domain, region, LONG, ALL, 0, KEY, 0, &mr, NULL));
	must("fi_mr_bind", fi_mr_bind(mr, &written->fid, FI_REMOTE_WRITE));
	must("fi_mr_bind", fi_mr_bind(mr, &many->fid, FI_REMOTE_READ));
	for (int i = 0; i < 5; i++) {
		must("fi_write", fi_write(a.ep, out, len[i], NULL, a.peer, 0, KEY, NULL));
		expect("written", next(&a), 0);
		must("fi_read", fi_read(a.ep, in, len[i], NULL, a.peer, 0, KEY, NULL));
		expect("read", next(&a), 0);
		all += len[i];
		expect("bytes written", value(a.writes, all), all);
		expect("bytes read", value(a.reads, all), all);
		expect("at the target", value(b.writes, all), all);
		expect("and read there", value(b.reads, all), all);
		expect("in the region", value(written, all), all);
	}
	expect("another counter of it counts reads", value(many, 4), 4);
	m.msg_iov = &iov, m.iov_count = 1, m.rma_iov = two, m.rma_iov_count = 2;
	must("fi_writemsg", fi_writemsg(a.ep, &m, FI_COMPLETION));
	expect("written", next(&a), 0);
	must("fi_atomic", fi_atomic(a.ep, operand, 500, NULL, a.peer, 0, KEY, FI_UINT64, FI_SUM, NULL));
	expect("added", next(&a), 0);
	all += 6000 + 4000;
	expect("bytes written to two ranges, and of elements", value(a.writes, all), all);
	expect("at the target", value(b.writes, all), all);
	must("fi_fetch_atomic", fi_fetch_atomic(a.ep, operand, 500, NULL, old, NULL, a.peer, 0, KEY,
						FI_UINT64, FI_SUM, NULL));
	expect("fetched", next(&a), 0);
	expect("bytes that were fetched are read", value(a.reads, all - 6000), all - 6000);
	expect("in the region they are written too", value(written, all + 4000), all + 4000);
	must("fi_write", fi_write(a.ep, out, 8, NULL, a.peer, 0, KEY + 1, NULL));
	expect("a key of nobody's", next(&a), FI_EKEYREJECTED);
	expect("no bytes of what failed", value(a.writes, all), all);
	expect("but a failure", fi_cntr_readerr(a.writes), 1);
	must("close", fi_close(&mr->fid));
	must("close", fi_close(&many->fid));
	must("close", fi_close(&written->fid));
}

/* What waits for a counter of bytes waits for bytes, and may be counted by another. */
static void deferred(void)
{
	struct fid_cntr *gate = open_cntr(&a, BYTES), *done = open_cntr(&a, BYTES);
	struct iovec iov = { out, 70 };
	struct fi_op_msg op = { .ep = a.ep };
	struct fi_deferred_work work = { .threshold = 100, .op_type = FI_OP_SEND };
	op.msg.msg_iov = &iov, op.msg.iov_count = 1, op.msg.addr = a.peer;
	work.triggering_cntr = gate, work.completion_cntr = done, work.op.msg = &op;
	must("fi_recv", fi_recv(b.ep, in, LONG, NULL, b.peer, NULL));
	expect("work", fi_control(&a.domain->fid, FI_QUEUE_WORK, &work), 0);
	must("fi_cntr_add", fi_cntr_add(gate, 99));
	expect("not before its time", value(done, 70), 0);
	must("fi_cntr_add", fi_cntr_add(gate, 1));
	expect("received", next(&b), 0);
	expect("its bytes", value(done, 70), 70);
	must("close", fi_close(&gate->fid));
	must("close", fi_close(&done->fid));
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cntr_attr odd = { .events = (enum fi_cntr_events) 2 };
	struct fid_cntr *none;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_RMA_EVENT | FI_TRIGGER;
	hints->ep_attr->type = FI_EP_RDM;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	open_side(&a, FI_SEND, FI_WRITE, FI_READ);
	open_side(&b, FI_RECV, FI_REMOTE_WRITE, FI_REMOTE_READ);
	a.peer = known(a.av, b.ep);
	b.peer = known(b.av, a.ep);
	expect("events of no kind", fi_cntr_open(a.domain, &odd, &none, NULL), -FI_ENOSYS);
	messages();
	one_sided();
	deferred();
	close_side(&a);
	close_side(&b);
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf("ok end\n");
	return bad != 0;
}
