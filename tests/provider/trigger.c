/*
 * Work that waits for a counter, through the headers that are installed: operations with
 * FI_TRIGGER, aliases whose operations all have it, and deferred work of every kind. Two domains in
 * one process; `a` does, `b` is done to. One line for each check: "ok NAME" or "BAD NAME: got X,
 * want Y".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <rdma/fi_trigger.h>

#include "check.h"

enum { SECONDS = 60, KEY = 77 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	/* Counts what the endpoint does. */
	struct fid_cntr *did;
	struct fid_cntr *gate, *done;
	fi_addr_t peer;
};

static struct fid_fabric *fabric;
static struct fi_info *info;
static struct side a, b;
static uint64_t region[64];
static struct fid_mr *mr;

static struct fid_cntr *open_cntr(struct side *s)
{
	struct fid_cntr *made;
	must("fi_cntr_open", fi_cntr_open(s->domain, NULL, &made, NULL));
	return made;
}

static void open_side(struct side *s)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .size = 64 };
	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	s->did = open_cntr(s);
	s->gate = open_cntr(s);
	s->done = open_cntr(s);
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->did->fid, FI_SEND | FI_RECV | FI_READ | FI_WRITE));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void know(struct side *s, struct side *other)
{
	s->peer = known(s->av, other->ep);
}

/* The next entry of a side: 1, or minus the error that it tells. */
static long next(struct side *s, struct fi_cq_tagged_entry *e)
{
	struct fi_cq_err_entry err = { 0 };
	double end = now() + SECONDS;
	ssize_t n;
	while ((n = fi_cq_read(s->cq, e, 1)) == -FI_EAGAIN) {
		fi_cntr_read(a.did), fi_cntr_read(b.did);
		if (now() > end)
			return -FI_ETIMEDOUT;
	}
	if (n != -FI_EAVAIL)
		return n;
	must("fi_cq_readerr", fi_cq_readerr(s->cq, &err, 0));
	e->op_context = err.op_context;
	return -err.err;
}

/* Lets both sides work until a counter has a value. */
static long until(struct fid_cntr *cntr, uint64_t value)
{
	double end = now() + SECONDS;
	while (fi_cntr_read(cntr) < value) {
		fi_cntr_read(a.did), fi_cntr_read(b.did);
		if (now() > end)
			break;
	}
	return fi_cntr_read(cntr);
}

/* Lets both sides work for some time in which nothing should happen. */
static void idle(void)
{
	for (int i = 0; i < 2000; i++)
		fi_cntr_read(a.did), fi_cntr_read(b.did);
}

static long entries(struct side *s)
{
	struct fi_cq_tagged_entry e;
	idle();
	return fi_cq_read(s->cq, &e, 1);
}

static struct fi_triggered_context when(struct fid_cntr *cntr, size_t threshold)
{
	struct fi_triggered_context c = { .event_type = FI_TRIGGER_THRESHOLD };
	c.trigger.threshold.cntr = cntr;
	c.trigger.threshold.threshold = threshold;
	return c;
}

/* Operations that are called with FI_TRIGGER, or through an alias that has it. */
static void triggered(void)
{
	static char in[4][8], out[4][8] = { "zero", "one", "two", "three" };
	struct fi_triggered_context c[4] = { when(a.gate, 3), when(a.gate, 1), when(a.gate, 3),
					     when(a.gate, 2) };
	struct fid_ep *late;
	struct fi_cq_tagged_entry e;
	struct iovec iov = { out[0], 8 };
	struct fi_msg_tagged m = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .tag = 1,
				   .context = &c[0] };
	int order[] = { 1, 3, 0, 2 };

	must("fi_endpoint", fi_endpoint(a.domain, info, &late, NULL));
	expect("before fi_enable", fi_tsendmsg(late, &m, FI_TRIGGER), -FI_EOPBADSTATE);
	must("close", fi_close(&late->fid));
	expect("alias without direction", fi_ep_alias(a.ep, &late, FI_TRIGGER), -FI_EINVAL);
	expect("alias of both", fi_ep_alias(a.ep, &late, FI_TRANSMIT | FI_RECV), -FI_EINVAL);
	must("fi_ep_alias", fi_ep_alias(a.ep, &late, FI_TRANSMIT | FI_TRIGGER));
	for (int i = 0; i < 4; i++)
		must("recv", fi_trecv(b.ep, in[i], 8, NULL, b.peer, 1, 0, in[i]));
	expect("no condition", fi_tsend(late, out[0], 8, NULL, a.peer, 1, NULL), -FI_EINVAL);
	c[0].event_type = FI_TRIGGER_XPU;
	expect("other condition", fi_tsend(late, out[0], 8, NULL, a.peer, 1, &c[0]), -FI_ENOSYS);
	c[0].event_type = FI_TRIGGER_THRESHOLD;
	expect("a message with the flag", fi_tsendmsg(a.ep, &m, FI_TRIGGER | FI_COMPLETION), 0);
	for (int i = 1; i < 4; i++)
		expect("by the alias", fi_tsend(late, out[i], 8, NULL, a.peer, 1, &c[i]), 0);
	expect("nothing before its time", entries(&b), -FI_EAGAIN);
	expect("a counter that is waited for", fi_close(&a.gate->fid), -FI_EBUSY);
	must("fi_cntr_add", fi_cntr_add(a.gate, 3));
	for (int i = 0; i < 4; i++) {
		expect("received", next(&b, &e), 1);
		expect("in the order of thresholds", strcmp(in[i], out[order[i]]), 0);
		expect("sent", next(&a, &e), 1);
		expect("with its context", e.op_context == &c[order[i]], 1);
	}
	expect("counted as any other", until(a.did, 4), 4);
	c[1] = when(a.gate, 3);
	expect("a threshold that is reached", fi_tsend(late, out[1], 8, NULL, a.peer, 2, &c[1]), 0);
	expect("sent at once", next(&a, &e), 1);
	must("recv", fi_trecv(b.ep, in[0], 8, NULL, b.peer, 2, 0, NULL));
	expect("and received", next(&b, &e), 1);
	c[1] = when(a.gate, 100);
	c[2] = when(a.gate, 4);
	expect("it can be posted", fi_tsend(late, out[1], 8, NULL, 99, 2, &c[2]), 0);
	expect("it will wait", fi_tsend(late, out[1], 8, NULL, a.peer, 2, &c[1]), 0);
	must("fi_cntr_add", fi_cntr_add(a.gate, 1));
	expect("to nobody: an error entry", next(&a, &e), -FI_EINVAL);
	expect("of the operation", e.op_context == &c[2], 1);
	c[3] = when(a.gate, 200);
	expect("another will wait", fi_tsend(late, out[3], 8, NULL, a.peer, 2, &c[3]), 0);
	expect("what waits is cancelled", fi_cancel(&late->fid, &c[3]), 0);
	expect("and says so", next(&a, &e), -FI_ECANCELED);
	expect("with its context", e.op_context == &c[3], 1);
	expect("once", fi_cancel(&a.ep->fid, &c[3]), -FI_ENODATA);
	expect("close alias", fi_close(&late->fid), 0);
}

/* What an operation with FI_INJECT sends is read by the call, whenever it is sent. */
static void injected(void)
{
	static char in[8], out[512] = "before";
	static uint64_t word[2] = { 5, 6 };
	struct fi_triggered_context c = when(a.gate, fi_cntr_read(a.gate) + 1);
	uint64_t flags = FI_TRIGGER | FI_INJECT | FI_COMPLETION;
	struct fi_cq_tagged_entry e;
	struct iovec iov = { out, 8 }, of_word = { word, 8 };
	struct fi_msg_tagged m = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .tag = 3,
				   .context = &c };
	struct fi_rma_iov to = { 0, 8, KEY };
	struct fi_msg_rma w = { .msg_iov = &of_word, .iov_count = 1, .addr = a.peer,
				.rma_iov = &to, .rma_iov_count = 1, .context = &c };
	struct fi_ioc operand = { &word[1], 1 };
	struct fi_rma_ioc on = { 8, 1, KEY };
	struct fi_msg_atomic s = { .msg_iov = &operand, .iov_count = 1, .addr = a.peer,
				   .rma_iov = &on, .rma_iov_count = 1, .datatype = FI_UINT64,
				   .op = FI_SUM, .context = &c };

	memset(region, 0, sizeof region);
	must("recv", fi_trecv(b.ep, in, 8, NULL, b.peer, 3, 0, NULL));
	expect("inject a message", fi_tsendmsg(a.ep, &m, flags), 0);
	expect("inject a write", fi_writemsg(a.ep, &w, flags), 0);
	expect("inject an atomic", fi_atomicmsg(a.ep, &s, flags), 0);
	iov.iov_len = sizeof out;
	expect("inject too much", fi_tsendmsg(a.ep, &m, flags), -FI_EMSGSIZE);
	strcpy(out, "after");
	word[0] = word[1] = 99;
	must("fi_cntr_add", fi_cntr_add(a.gate, 1));
	for (int i = 0; i < 3; i++)
		expect("done", next(&a, &e), 1);
	expect("received", next(&b, &e), 1);
	expect("as it was", strcmp(in, "before"), 0);
	expect("written as it was", region[0], 5);
	expect("added as it was", region[1], 6);
}

/* What a request of each kind has. */
static struct {
	struct fi_deferred_work work;
	struct fi_op_tagged tagged;
	struct fi_op_msg msg;
	struct fi_op_rma rma;
	struct fi_op_atomic atomic;
	struct fi_op_fetch_atomic fetch;
	struct fi_op_compare_atomic compare;
	struct fi_op_cntr cntr;
	struct iovec iov;
	struct fi_ioc ioc[3];
	struct fi_rma_iov rma_iov;
	struct fi_rma_ioc rma_ioc;
	uint64_t buf[8];
} r[12];

static long submit(struct side *s, int i, int type, uint64_t threshold, void *op)
{
	struct fi_deferred_work *w = &r[i].work;
	w->threshold = threshold;
	w->triggering_cntr = s->gate;
	w->completion_cntr = type >= FI_OP_CNTR_SET ? NULL : s->done;
	w->op_type = type;
	w->op.tagged = op;
	return fi_control(&s->domain->fid, FI_QUEUE_WORK, w);
}

static long defer_tagged(struct side *s, int i, int type, uint64_t threshold, uint64_t tag,
			 uint64_t flags)
{
	r[i].iov = (struct iovec) { r[i].buf, 8 };
	r[i].tagged.ep = s->ep;
	r[i].tagged.msg = (struct fi_msg_tagged) { .msg_iov = &r[i].iov, .iov_count = 1,
		.addr = s->peer, .tag = tag, .context = &r[i] };
	r[i].tagged.flags = flags;
	return submit(s, i, type, threshold, &r[i].tagged);
}

static long defer_rma(int i, int type, uint64_t threshold, int at)
{
	r[i].iov = (struct iovec) { r[i].buf, 8 };
	r[i].rma_iov = (struct fi_rma_iov) { at * 8, 8, KEY };
	r[i].rma.ep = a.ep;
	r[i].rma.msg = (struct fi_msg_rma) { .msg_iov = &r[i].iov, .iov_count = 1, .addr = a.peer,
		.rma_iov = &r[i].rma_iov, .rma_iov_count = 1 };
	return submit(&a, i, type, threshold, &r[i].rma);
}

static long defer_atomic(int i, int type, uint64_t threshold, int at)
{
	struct fi_msg_atomic m = { .msg_iov = &r[i].ioc[0], .iov_count = 1, .addr = a.peer,
		.rma_iov = &r[i].rma_ioc, .rma_iov_count = 1, .datatype = FI_UINT64,
		.op = type == FI_OP_COMPARE_ATOMIC ? FI_CSWAP : FI_SUM };
	struct fi_msg_fetch f = { .msg_iov = &r[i].ioc[1], .iov_count = 1 };
	struct fi_msg_compare c = { .msg_iov = &r[i].ioc[2], .iov_count = 1 };
	for (int k = 0; k < 3; k++)
		r[i].ioc[k] = (struct fi_ioc) { &r[i].buf[k], 1 };
	r[i].rma_ioc = (struct fi_rma_ioc) { at * 8, 1, KEY };
	if (type == FI_OP_ATOMIC) {
		r[i].atomic = (struct fi_op_atomic) { a.ep, m, 0 };
		return submit(&a, i, type, threshold, &r[i].atomic);
	}
	if (type == FI_OP_FETCH_ATOMIC) {
		r[i].fetch = (struct fi_op_fetch_atomic) { a.ep, m, f, 0 };
		return submit(&a, i, type, threshold, &r[i].fetch);
	}
	r[i].compare = (struct fi_op_compare_atomic) { a.ep, m, f, c, 0 };
	return submit(&a, i, type, threshold, &r[i].compare);
}

static long defer_cntr(int i, int type, uint64_t threshold, struct fid_cntr *cntr, uint64_t value)
{
	r[i].cntr = (struct fi_op_cntr) { cntr, value };
	return submit(&a, i, type, threshold, &r[i].cntr);
}

/* Work that begins work: each kind once, the end of each the condition of the next. */
static void chain(void)
{
	struct fid_cntr *gate = a.gate;
	uint64_t did;

	a.gate = a.done;
	did = fi_cntr_read(a.did);
	memset(r, 0, sizeof r);
	memset(region, 0, sizeof region);
	r[0].buf[0] = 11;
	r[2].buf[0] = 5;
	r[3].buf[0] = 6;
	r[4].buf[0] = 21, r[4].buf[2] = 11;
	expect("defer a write", defer_rma(0, FI_OP_WRITE, 1, 4), 0);
	expect("defer a read", defer_rma(1, FI_OP_READ, 2, 4), 0);
	expect("defer an atomic", defer_atomic(2, FI_OP_ATOMIC, 3, 5), 0);
	expect("defer a fetch", defer_atomic(3, FI_OP_FETCH_ATOMIC, 4, 5), 0);
	expect("defer a compare", defer_atomic(4, FI_OP_COMPARE_ATOMIC, 5, 4), 0);
	expect("defer a set", defer_cntr(5, FI_OP_CNTR_SET, 6, gate, 40), 0);
	expect("defer an add", defer_cntr(6, FI_OP_CNTR_ADD, 6, gate, 2), 0);
	idle();
	expect("nothing before its time", region[4], 0);
	expect("begin", fi_cntr_add(a.done, 1), 0);
	expect("set and added", until(gate, 42), 42);
	expect("each was counted once", fi_cntr_read(a.done), 6);
	expect("written and swapped", region[4], 21);
	expect("read", r[1].buf[0], 11);
	expect("summed", region[5], 11);
	expect("fetched", r[3].buf[1], 5);
	expect("compared", r[4].buf[1], 11);
	expect("no entries", entries(&a), -FI_EAGAIN);
	expect("the endpoint counts none", fi_cntr_read(a.did) - did, 0);
	a.gate = gate;
}

/* Messages, both ends deferred; cancel and flush; what is refused. */
static void messages(void)
{
	struct fi_cq_tagged_entry e;
	uint64_t done, did = fi_cntr_read(b.did);

	memset(r, 0, sizeof r);
	must("set", fi_cntr_set(a.gate, 0));
	must("set", fi_cntr_set(a.done, 0));
	r[0].buf[0] = 7, r[2].buf[0] = 8, r[4].buf[0] = 9;
	expect("defer a receive", defer_tagged(&b, 1, FI_OP_TRECV, 1, 5, 0), 0);
	expect("defer another", defer_tagged(&b, 3, FI_OP_TRECV, 1, 5, FI_COMPLETION), 0);
	expect("defer a send", defer_tagged(&a, 0, FI_OP_TSEND, 1, 5, 0), 0);
	expect("defer another", defer_tagged(&a, 2, FI_OP_TSEND, 2, 5, FI_COMPLETION), 0);
	expect("defer a third", defer_tagged(&a, 4, FI_OP_TSEND, 3, 5, 0), 0);
	expect("and a fourth", defer_tagged(&a, 5, FI_OP_TSEND, 4, 5, 0), 0);
	expect("cancel the third", fi_control(&a.domain->fid, FI_CANCEL_WORK, &r[4].work), 0);
	expect("cancel it again", fi_control(&a.domain->fid, FI_CANCEL_WORK, &r[4].work),
	       -FI_ENODATA);
	must("add", fi_cntr_add(b.gate, 1));
	must("add", fi_cntr_add(a.gate, 2));
	expect("both sent", until(a.done, 2), 2);
	expect("both received", until(b.done, 2), 2);
	expect("the first", r[1].buf[0], 7);
	expect("the second", r[3].buf[0], 8);
	expect("one asked for an entry", next(&a, &e), 1);
	expect("which names it", e.op_context == &r[2], 1);
	expect("and one here", next(&b, &e), 1);
	expect("which names it", e.op_context == &r[3], 1);
	expect("flush", fi_control(&a.domain->fid, FI_FLUSH_WORK, NULL), 0);
	must("add", fi_cntr_add(a.gate, 5));
	expect("no more entries", entries(&a), -FI_EAGAIN);
	expect("nothing more was done", fi_cntr_read(a.done), 2);
	expect("the endpoint counted none", fi_cntr_read(b.did) - did, 0);

	done = fi_cntr_readerr(a.done);
	a.peer += 50;
	expect("to nobody", defer_tagged(&a, 6, FI_OP_TSEND, 1, 5, 0), 0);
	a.peer -= 50;
	expect("is an error entry", next(&a, &e), -FI_EINVAL);
	expect("and counted", fi_cntr_readerr(a.done) - done, 1);
	expect("no such work", submit(&a, 6, 99, 1, &r[6].tagged), -FI_ENOSYS);
	expect("no operation", submit(&a, 6, FI_OP_TSEND, 1, NULL), -FI_EINVAL);
	r[6].work.completion_cntr = a.done;
	r[6].cntr = (struct fi_op_cntr) { a.gate, 1 };
	r[6].work.op_type = FI_OP_CNTR_ADD;
	r[6].work.op.cntr = &r[6].cntr;
	expect("a counter operation is not counted",
	       fi_control(&a.domain->fid, FI_QUEUE_WORK, &r[6].work), -FI_EINVAL);
	r[6].work.triggering_cntr = NULL;
	expect("no counter", fi_control(&a.domain->fid, FI_QUEUE_WORK, &r[6].work), -FI_EINVAL);
	r[6].work.triggering_cntr = b.gate;
	r[6].work.completion_cntr = NULL;
	expect("of another domain", fi_control(&a.domain->fid, FI_QUEUE_WORK, &r[6].work),
	       -FI_EINVAL);
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo(), *plain;
	struct fid_cntr *counted;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &plain));
	expect("not told unasked", !!(plain->caps & FI_TRIGGER), 0);
	hints->caps |= FI_TRIGGER;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	expect("told when asked", !!(info->caps & FI_TRIGGER), 1);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	open_side(&a);
	open_side(&b);
	know(&a, &b);
	know(&b, &a);
	must("fi_mr_reg", fi_mr_reg(b.domain, region, sizeof region,
				    FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	triggered();
	injected();
	chain();
	messages();

	/* A counter can be closed before the endpoint whose work it has counted. */
	expect("close counter", fi_close(&a.done->fid), 0);
	counted = b.done;
	memset(r, 0, sizeof r);
	must("defer", defer_tagged(&b, 0, FI_OP_TRECV, 0, 9, 0));
	expect("it counts work under way", fi_close(&counted->fid), -FI_EBUSY);
	must("close", fi_close(&mr->fid));
	expect("close endpoints", fi_close(&a.ep->fid) | fi_close(&b.ep->fid), 0);
	expect("close counters", fi_close(&a.gate->fid) | fi_close(&counted->fid), 0);
	must("close", fi_close(&b.gate->fid));
	must("close", fi_close(&a.did->fid) | fi_close(&b.did->fid));
	must("close", fi_close(&a.cq->fid) | fi_close(&b.cq->fid));
	must("close", fi_close(&a.av->fid) | fi_close(&b.av->fid));
	expect("close domains", fi_close(&a.domain->fid) | fi_close(&b.domain->fid), 0);
	must("close", fi_close(&fabric->fid));
	printf("ok end\n");
	return bad > 0;
}
