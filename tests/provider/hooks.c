/*
 * libfabric's own hooks (FI_HOOK) around us: messages, tagged messages, remote memory, atomics,
 * counters, event queues and errors go through them as they are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

#define LONG 200000
#define KEY 7

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;

struct side {
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_cntr *cntr;
	struct fid_ep *ep;
	fi_addr_t peer;
};

static struct side a, b;

static void open_side(struct side *s)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_cntr_attr cntr = { .events = FI_CNTR_EVENTS_COMP };

	must("fi_av_open", fi_av_open(domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq, &s->cq, NULL));
	must("fi_cntr_open", fi_cntr_open(domain, &cntr, &s->cntr, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->cntr->fid, FI_SEND | FI_WRITE | FI_READ));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cntr->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
}

/* The next entry of `s`, or the negative error of its error entry. */
static int next(struct side *s, struct fi_cq_tagged_entry *entry)
{
	struct fi_cq_tagged_entry none;
	struct fi_cq_err_entry e = { 0 };

	for (double end = now() + 20; now() < end;) {
		ssize_t n = fi_cq_read(s->cq, entry, 1);
		if (n == 1)
			return 1;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
			return -e.err;
		}
		fi_cq_read(s == &a ? b.cq : a.cq, &none, 0);
	}
	return 0;
}

static void messages(void)
{
	static char out[LONG], in[LONG];
	static const size_t lens[] = { 0, 8, 5000, LONG };
	struct fi_cq_tagged_entry e;
	fi_addr_t src;

	for (size_t i = 0; i < LONG; i++)
		out[i] = (char) (i * 7);
	for (int i = 0; i < 4; i++) {
		memset(in, 0, sizeof in);
		must("fi_trecv", fi_trecv(b.ep, in, LONG, NULL, FI_ADDR_UNSPEC, 5, 0, in));
		must("fi_tsend", fi_tsend(a.ep, out, lens[i], NULL, a.peer, 5, out));
		expect("tagged: sent", next(&a, &e) == 1 && e.op_context == out, 1);
		expect("tagged: came", next(&b, &e) == 1 && e.op_context == in, 1);
		expect("tagged: whole", e.len == lens[i] && e.tag == 5 && !memcmp(in, out, lens[i]), 1);
		must("fi_recv", fi_recv(b.ep, in, LONG, NULL, FI_ADDR_UNSPEC, in));
		must("fi_senddata", fi_senddata(a.ep, out, lens[i], NULL, 77, a.peer, out));
		expect("sent", next(&a, &e), 1);
		expect("came", next(&b, &e) == 1 && e.len == lens[i] && e.data == 77, 1);
	}
	must("fi_inject", fi_inject(a.ep, "inject", 7, a.peer));
	must("fi_recv", fi_recv(b.ep, in, 64, NULL, FI_ADDR_UNSPEC, in));
	for (double end = now() + 20; now() < end;) {
		struct fi_cq_tagged_entry none;
		fi_cq_read(a.cq, &none, 0);
		if (fi_cq_readfrom(b.cq, &e, 1, &src) == 1)
			break;
	}
	expect("injected", strcmp(in, "inject") == 0 && src == b.peer, 1);
	must("fi_recv", fi_recv(b.ep, in, 64, NULL, FI_ADDR_UNSPEC, in));
	expect("cancelled", fi_cancel(&b.ep->fid, in) == 0 && next(&b, &e) == -FI_ECANCELED, 1);
}

static void memory(void)
{
	static char out[LONG], back[LONG];
	static uint64_t region[LONG / 8];
	struct fi_cq_tagged_entry e;
	struct fid_mr *mr;
	uint64_t one = 1, old = 9;

	memset(out, 3, sizeof out);
	must("fi_mr_reg", fi_mr_reg(domain, region, sizeof region, FI_REMOTE_READ | FI_REMOTE_WRITE, 0,
				    KEY, 0, &mr, NULL));
	expect("a key", fi_mr_key(mr), KEY);
	must("fi_write", fi_write(a.ep, out, LONG, NULL, a.peer, 0, KEY, out));
	expect("written", next(&a, &e), 1);
	expect("there", memcmp(region, out, LONG), 0);
	must("fi_read", fi_read(a.ep, back, LONG, NULL, a.peer, 0, KEY, back));
	expect("read", next(&a, &e), 1);
	expect("the same", memcmp(back, out, LONG), 0);
	region[0] = 41;
	must("fi_fetch_atomic", fi_fetch_atomic(a.ep, &one, 1, NULL, &old, NULL, a.peer, 0, KEY,
						FI_UINT64, FI_SUM, &old));
	expect("fetched", next(&a, &e), 1);
	expect("added", old == 41 && region[0] == 42, 1);
	must("fi_write", fi_write(a.ep, out, 8, NULL, a.peer, 0, KEY + 1, out));
	expect("no such key", next(&a, &e), -FI_EKEYREJECTED);
	must("close", fi_close(&mr->fid));
}

static const char *library_of(void *function)
{
	Dl_info is;
	return dladdr(function, &is) ? is.dli_fname : "";
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	open_side(&a);
	open_side(&b);
	expect("the hook is around us", strstr(library_of(fabric->ops->domain), "barewire") == NULL, 1);
	a.peer = known(a.av, b.ep);
	b.peer = known(b.av, a.ep);
	messages();
	memory();
	expect("the counter went through", (long) fi_cntr_read(a.cntr), 12);
	expect("and its errors", (long) fi_cntr_readerr(a.cntr), 1);
	close_side(&a);
	close_side(&b);
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf("ok end\n");
	return bad != 0;
}
