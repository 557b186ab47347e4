/*
 * Receives that several endpoints share, through the headers that are installed: a context with
 * three endpoints in one domain, and one who sends to them in another. One line for each check:
 * "ok NAME" or "BAD NAME: got X, want Y".
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

enum { SHARERS = 3, SECONDS = 60, LONG = 1 << 20 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
};

static struct fid_fabric *fabric;
static struct fi_info *info;
static struct side from, to;
static struct fid_ep *sender, *sharer[SHARERS], *srx;
static struct fid_cq *sender_cq, *cq[SHARERS];
static fi_addr_t peer[SHARERS], back;
static char in[8][LONG], out[LONG];

static void open_domain(struct side *s)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
}

static struct fid_cq *open_cq(struct side *s)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = 16 };
	struct fid_cq *made;
	must("fi_cq_open", fi_cq_open(s->domain, &attr, &made, NULL));
	return made;
}

static struct fid_ep *open_ep(struct side *s, struct fid_cq *with, struct fid_ep *context)
{
	struct fid_ep *made;
	must("fi_endpoint", fi_endpoint(s->domain, info, &made, NULL));
	must("bind cq", fi_ep_bind(made, &with->fid, FI_TRANSMIT | FI_RECV));
	must("bind av", fi_ep_bind(made, &s->av->fid, 0));
	if (context)
		must("bind context", fi_ep_bind(made, &context->fid, 0));
	must("fi_enable", fi_enable(made));
	return made;
}

/* The next completion of sharer `i`: its context, or NULL if it is an error, which is in `err`. */
static void *next(int i, struct fi_cq_tagged_entry *e, struct fi_cq_err_entry *err)
{
	struct fi_cq_tagged_entry sent;
	time_t end = time(NULL) + SECONDS;
	ssize_t n;
	while ((n = fi_cq_read(cq[i], e, 1)) != 1) {
		if (n == -FI_EAVAIL) {
			memset(err, 0, sizeof *err);
			must("fi_cq_readerr", fi_cq_readerr(cq[i], err, 0));
			return NULL;
		}
		fi_cq_read(sender_cq, &sent, 1);
		if (time(NULL) > end) {
			printf("BAD no completion for endpoint %d\n", i);
			exit(1);
		}
	}
	return e->op_context;
}

static void send_to(int i, size_t len, uint64_t tag)
{
	struct fi_cq_tagged_entry e;
	ssize_t ret;
	for (size_t k = 0; k < len; k++)
		out[k] = (char) (k * 7 + (size_t) i);
	while ((ret = fi_tsend(sender, out, len, NULL, peer[i], tag, NULL)) == -FI_EAGAIN)
		fi_cq_read(sender_cq, &e, 1);
	must("fi_tsend", ret);
}

static int holds(const char *what, size_t len, int i)
{
	for (size_t k = 0; k < len; k++)
		if (what[k] != (char) (k * 7 + (size_t) i))
			return 0;
	return 1;
}

static void messages(void)
{
	size_t lens[] = { 0, 8, 3000, 100000, LONG };
	struct fi_cq_tagged_entry e = { 0 };
	struct fi_cq_err_entry err;
	for (size_t l = 0; l < sizeof lens / sizeof *lens; l++) {
		for (int k = 0; k < SHARERS; k++)
			must("fi_trecv", fi_trecv(srx, in[k], LONG, NULL, FI_ADDR_UNSPEC, 5, 0,
						  in[k]));
		for (int k = 0; k < SHARERS; k++) {
			int i = (k + 2) % SHARERS;
			send_to(i, lens[l], 5);
			expect("the next receive takes it", next(i, &e, &err) == in[k], 1);
			expect("its length", (long) e.len, (long) lens[l]);
			expect("its bytes", holds(in[k], lens[l], i), 1);
		}
	}
	/* First the messages, then their receives. */
	send_to(0, 8, 1);
	send_to(1, 8, 2);
	must("fi_trecv", fi_trecv(srx, in[2], LONG, NULL, FI_ADDR_UNSPEC, 2, 0, in[2]));
	must("fi_trecv", fi_trecv(srx, in[1], LONG, NULL, back, 1, 0, in[1]));
	expect("an early message", next(1, &e, &err) == in[2] && holds(in[2], 8, 1), 1);
	expect("and one from a source", next(0, &e, &err) == in[1] && holds(in[1], 8, 0), 1);
	/* Untagged, and longer than its buffer. */
	must("fi_recv", fi_recv(srx, in[0], 4, NULL, FI_ADDR_UNSPEC, in[0]));
	must("fi_send", fi_send(sender, out, 64, NULL, peer[1], NULL));
	expect("a long one is told", next(1, &e, &err) == NULL && err.err == FI_ETRUNC
		       && err.olen == 60 && err.op_context == in[0], 1);
}

static void refusals(void)
{
	struct iovec iov = { in[0], 8 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC };
	struct fi_msg_tagged peek = { .addr = FI_ADDR_UNSPEC };
	struct fi_cq_tagged_entry e;
	struct fi_cq_err_entry err;
	struct fid_ep *other;
	expect("fi_recv on an endpoint that shares", fi_recv(sharer[0], in, 8, NULL, 0, NULL),
	       -FI_EOPNOTSUPP);
	expect("fi_send on a context", fi_send(srx, out, 8, NULL, 0, NULL), -FI_EOPNOTSUPP);
	expect("fi_write on a context", fi_write(srx, out, 8, NULL, 0, 0, 0, NULL), -FI_ENOSYS);
	expect("FI_MULTI_RECV", fi_recvmsg(srx, &msg, FI_MULTI_RECV), -FI_EBADFLAGS);
	expect("FI_PEEK", fi_trecvmsg(srx, &peek, FI_PEEK), -FI_EBADFLAGS);
	expect("a source that is not known", fi_trecv(srx, in[0], 8, NULL, 77, 5, 0, NULL),
	       -FI_EINVAL);
	expect("fi_enable of a context", fi_enable(srx), 0);
	expect("bind when enabled", fi_ep_bind(sharer[0], &srx->fid, 0), -FI_EOPBADSTATE);
	must("fi_endpoint", fi_endpoint(to.domain, info, &other, NULL));
	expect("bind an endpoint", fi_ep_bind(other, &sharer[0]->fid, 0), -FI_EINVAL);
	expect("bind a context", fi_ep_bind(other, &srx->fid, 0), 0);
	expect("bind it twice", fi_ep_bind(other, &srx->fid, 0), -FI_EINVAL);
	must("close", fi_close(&other->fid));
	must("fi_trecv", fi_trecv(srx, in[0], 8, NULL, FI_ADDR_UNSPEC, 9, 0, in[0]));
	expect("fi_cancel", fi_cancel(&srx->fid, in[0]), 0);
	expect("fi_cancel again", fi_cancel(&srx->fid, in[0]), -FI_ENODATA);
	expect("one who shares tells", next(0, &e, &err) == NULL && err.err == FI_ECANCELED
		       && err.op_context == in[0], 1);
	expect("close a context in use", fi_close(&srx->fid), -FI_EBUSY);
}

static long defer(struct fi_deferred_work *work, struct fi_op_tagged *op, struct fid_ep *ep)
{
	op->ep = ep;
	work->op_type = FI_OP_TRECV;
	work->op.tagged = op;
	return fi_control(&to.domain->fid, FI_QUEUE_WORK, work);
}

/* A receive that waits for a counter is the context's, and counted by the counter that it names. */
static void deferred(void)
{
	struct iovec iov = { in[4], LONG };
	struct fi_op_tagged op = {
		.msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .tag = 6, .context = in[4] },
		.flags = FI_COMPLETION,
	};
	struct fi_deferred_work work = { .threshold = 1 };
	struct fi_cq_tagged_entry e;
	struct fi_cq_err_entry err;
	struct fid_cntr *gate, *done;
	must("fi_cntr_open", fi_cntr_open(to.domain, NULL, &gate, NULL));
	must("fi_cntr_open", fi_cntr_open(to.domain, NULL, &done, NULL));
	work.triggering_cntr = gate;
	work.completion_cntr = done;
	expect("defer on one that shares", defer(&work, &op, sharer[0]), -FI_EOPNOTSUPP);
	expect("defer on the context", defer(&work, &op, srx), 0);
	send_to(2, 100, 6);
	must("fi_cntr_add", fi_cntr_add(gate, 1));
	expect("it takes the message", next(2, &e, &err) == in[4] && holds(in[4], 100, 2), 1);
	expect("and is counted", fi_cntr_read(done), 1);
	op.msg.addr = 77;
	expect("from nobody", defer(&work, &op, srx), 0);
	expect("is told", next(0, &e, &err) == NULL && err.err == FI_EINVAL
		       && err.op_context == in[4], 1);
	expect("and counted", fi_cntr_readerr(done), 1);
	must("close", fi_close(&done->fid));
	must("close", fi_close(&gate->fid));
}

/* Endpoints come and go; receives stay. */
static void closing(void)
{
	struct fi_cq_tagged_entry e;
	struct fi_cq_err_entry err;
	must("fi_trecv", fi_trecv(srx, in[3], LONG, NULL, FI_ADDR_UNSPEC, 5, 0, in[3]));
	expect("close an endpoint that shares", fi_close(&sharer[0]->fid), 0);
	sharer[0] = open_ep(&to, cq[0], srx);
	peer[0] = known(from.av, sharer[0]);
	send_to(0, 100, 5);
	expect("the next one takes the receive", next(0, &e, &err) == in[3] && holds(in[3], 100, 0),
	       1);
	must("fi_trecv", fi_trecv(srx, in[0], LONG, NULL, FI_ADDR_UNSPEC, 5, 0, in[0]));
	for (int i = 0; i < SHARERS; i++) {
		must("close", fi_close(&sharer[i]->fid));
		must("close", fi_close(&cq[i]->fid));
	}
	expect("close the vector", fi_close(&to.av->fid), 0);
	expect("close a context with a receive", fi_close(&srx->fid), 0);
	must("close", fi_close(&sender->fid));
	must("close", fi_close(&sender_cq->fid));
	must("close", fi_close(&from.av->fid));
	expect("close its domain", fi_close(&to.domain->fid), 0);
	must("close", fi_close(&from.domain->fid));
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();
	hints->caps = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_TRIGGER;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->rx_ctx_cnt = FI_SHARED_CONTEXT;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	expect("the answer shares", info->ep_attr->rx_ctx_cnt == FI_SHARED_CONTEXT, 1);
	expect("some can share", info->domain_attr->max_ep_srx_ctx > 0, 1);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	open_domain(&from);
	open_domain(&to);
	sender_cq = open_cq(&from);
	sender = open_ep(&from, sender_cq, NULL);
	must("fi_srx_context", fi_srx_context(to.domain, info->rx_attr, &srx, &from));
	expect("its own context", srx->fid.context == &from, 1);
	for (int i = 0; i < SHARERS; i++) {
		cq[i] = open_cq(&to);
		sharer[i] = open_ep(&to, cq[i], srx);
		peer[i] = known(from.av, sharer[i]);
	}
	back = known(to.av, sender);
	messages();
	refusals();
	deferred();
	closing();
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(hints);
	fi_freeinfo(info);
	printf("ok end\n");
	return 0;
}
