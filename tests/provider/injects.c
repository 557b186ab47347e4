/*
 * Injected operations that fail: no completion queue says so, a counter counts them and the log
 * names the peer (M7, AF3). One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_cntr *cntr;
	struct fid_ep *ep;
};

static struct fi_info *info;
static struct fid_fabric *fabric;

static void open_side(struct side *s, uint64_t selective)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cntr_attr cntr = { 0 };

	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cntr_open", fi_cntr_open(s->domain, &cntr, &s->cntr, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV | selective));
	must("bind", fi_ep_bind(s->ep, &s->cntr->fid, FI_SEND | FI_WRITE));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cntr->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
}

/* Entries that `s` reads until its counter has counted `errors`: those with context `mine`. Any
 * other is one too many. */
static int told(struct side *s, struct side *other, uint64_t errors, void *mine)
{
	struct fi_cq_tagged_entry entry;
	int found = 0;

	for (double end = now() + 10; now() < end && fi_cntr_readerr(s->cntr) < errors;) {
		struct fi_cq_err_entry e = { 0 };
		ssize_t n = fi_cq_read(s->cq, &entry, 1);
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
			expect("an error entry has the context of its call", e.op_context == mine, 1);
			found++;
		}
		if (other)
			fi_cq_read(other->cq, &entry, 0);
	}
	expect("errors that the counter has", (long) fi_cntr_readerr(s->cntr), (long) errors);
	for (struct fi_cq_err_entry e = { 0 }; fi_cq_readerr(s->cq, &e, 0) == 1; found++)
		expect("an error entry has the context of its call", e.op_context == mine, 1);
	return found;
}

/* To a station that is not there: all of them wait until T_dead, and one that has a context. */
static void to_nobody(uint64_t selective)
{
	unsigned char name[16] = { 2, 0x77, 0, 0, 0, 9, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0 };
	struct side s;
	struct iovec iov = { name, 8 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .context = &msg };
	uint64_t one = 1;
	fi_addr_t to;

	open_side(&s, selective);
	must("fi_av_insert", fi_av_insert(s.av, name, 1, &to, 0, NULL) - 1);
	msg.addr = to;
	must("fi_inject", fi_inject(s.ep, "abc", 3, to));
	must("fi_injectdata", fi_injectdata(s.ep, "abc", 3, 4, to));
	must("fi_tinject", fi_tinject(s.ep, "abc", 3, to, 5));
	must("fi_tinjectdata", fi_tinjectdata(s.ep, "abc", 3, 4, to, 5));
	must("fi_inject_write", fi_inject_write(s.ep, &one, 8, to, 0, 7));
	must("fi_inject_writedata", fi_inject_writedata(s.ep, &one, 8, 4, to, 0, 7));
	must("fi_inject_atomic", fi_inject_atomic(s.ep, &one, 1, to, 0, 7, FI_UINT64, FI_SUM));
	must("fi_sendmsg with FI_INJECT", fi_sendmsg(s.ep, &msg, FI_INJECT));
	expect("entries: only that of fi_sendmsg", told(&s, NULL, 8, &msg), 1);
	close_side(&s);
}

/* Refused by a peer that is there. */
static void refused(void)
{
	struct side a, b;
	struct fid_mr *mr;
	uint64_t memory[2] = { 5, 5 }, one = 1;
	fi_addr_t to;
	char c;

	open_side(&a, 0);
	open_side(&b, 0);
	to = known(a.av, b.ep);
	must("fi_mr_reg", fi_mr_reg(b.domain, memory, 8, FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
	/* So that there is a session, and the short way is taken from then on. */
	must("fi_inject_write", fi_inject_write(a.ep, &one, 8, to, 0, 7));
	for (double end = now() + 10; now() < end && fi_cntr_read(a.cntr) < 1;) {
		struct fi_cq_tagged_entry none;
		fi_cq_read(b.cq, &none, 0);
	}
	expect("a good one is counted", (long) fi_cntr_read(a.cntr), 1);
	expect("and done", (long) memory[0], 1);
	must("fi_inject_write", fi_inject_write(a.ep, &one, 8, to, 0, 8));
	expect("no entry: wrong key", told(&a, &b, 1, &c), 0);
	must("fi_inject_write", fi_inject_write(a.ep, &one, 8, to, 8, 7));
	expect("no entry: behind the region", told(&a, &b, 2, &c), 0);
	must("fi_inject_atomic", fi_inject_atomic(a.ep, &one, 1, to, 8, 7, FI_UINT64, FI_SUM));
	expect("no entry: atomic behind the region", told(&a, &b, 3, &c), 0);
	expect("nothing else was written", memory[0] == 1 && memory[1] == 5, 1);
	must("close", fi_close(&mr->fid));
	close_side(&a);
	close_side(&b);
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	to_nobody(0);
	to_nobody(FI_SELECTIVE_COMPLETION);
	refused();
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
