/*
 * Every entry of every table of every object is a function: what we do not have is refused by
 * -FI_ENOSYS, and no call jumps to NULL, whichever libfabric the program was built with.
 */
#include <string.h>

#include <rdma/fi_atomic.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

static int entries, tables, objects;

/* A table: its size, then functions. */
static void table(const char *object, const char *name, const void *at, size_t installed)
{
	const size_t *size = at;
	void *const *entry = at;
	char what[100];

	snprintf(what, sizeof what, "%s: %s", object, name);
	if (!at) {
		expect(what, 0, 1);
		return;
	}
	expect(what, *size >= installed && *size % sizeof(void *) == 0 && *size < 1000, 1);
	for (size_t i = 1; i < *size / sizeof(void *); i++) {
		entries++;
		if (!entry[i])
			expect(what, 0, (long) i);
	}
	tables++;
}

/* What begins every object: its own table, whose calls that nobody has are made. */
static void base(const char *object, struct fid *fid)
{
	char text[64];
	void *to = &text;

	objects++;
	table(object, "fid", fid->ops, sizeof(struct fi_ops));
	expect(object, fid->ops->ops_open(fid, "a table of nobody's", 0, &to, NULL), -FI_ENOSYS);
	expect(object, fid->ops->ops_set(fid, "a table of nobody's", 0, to, NULL), -FI_ENOSYS);
	expect(object, fid->ops->tostr(fid, text, sizeof text), -FI_ENOSYS);
	expect(object, fid->ops->control(fid, 4711, NULL) < 0, 1);
	expect(object, fi_open_ops(fid, "a table of nobody's", 0, &to, NULL), -FI_ENOSYS);
}

#define TABLE(object, at, type) table(object, #type, at, sizeof(struct type))

static void endpoint(const char *object, struct fid_ep *ep)
{
	base(object, &ep->fid);
	TABLE(object, ep->ops, fi_ops_ep);
	TABLE(object, ep->cm, fi_ops_cm);
	TABLE(object, ep->msg, fi_ops_msg);
	TABLE(object, ep->rma, fi_ops_rma);
	TABLE(object, ep->tagged, fi_ops_tagged);
	TABLE(object, ep->atomic, fi_ops_atomic);
	TABLE(object, ep->collective, fi_ops_collective);
}

static struct fi_info *ask(uint64_t caps, enum fi_ep_type type)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = caps;
	hints->ep_attr->type = type;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	return info;
}

int main(void)
{
	struct fi_info *info = ask(FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_COLLECTIVE, FI_EP_RDM);
	struct fi_info *msg = ask(FI_MSG, FI_EP_MSG);
	struct fi_wait_attr wait_attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_av_set_attr set_attr = { .start_addr = 0, .end_addr = 0, .stride = 1 };
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_NONE };
	struct fi_poll_attr poll_attr = { 0 };
	struct fi_cntr_attr cntr_attr = { 0 };
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	static char memory[64];
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_wait *wait;
	struct fid_poll *poll;
	struct fid_eq *eq;
	struct fid_cq *cq;
	struct fid_cntr *cntr;
	struct fid_av *av;
	struct fid_av_set *set;
	struct fid_mr *mr;
	struct fid_stx *stx;
	struct fid_pep *pep;
	struct fid_ep *ep, *sep, *srx, *tx, *rx, *connected;

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_wait_open", fi_wait_open(fabric, &wait_attr, &wait));
	must("fi_eq_open", fi_eq_open(fabric, &eq_attr, &eq, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_poll_open", fi_poll_open(domain, &poll_attr, &poll));
	must("fi_cntr_open", fi_cntr_open(domain, &cntr_attr, &cntr, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("fi_mr_reg", fi_mr_reg(domain, memory, 64, FI_REMOTE_READ, 0, 1, 0, &mr, NULL));
	must("fi_stx_context", fi_stx_context(domain, info->tx_attr, &stx, NULL));
	must("fi_srx_context", fi_srx_context(domain, info->rx_attr, &srx, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("fi_scalable_ep", fi_scalable_ep(domain, info, &sep, NULL));
	must("fi_tx_context", fi_tx_context(sep, 0, NULL, &tx, NULL));
	must("fi_rx_context", fi_rx_context(sep, 0, NULL, &rx, NULL));
	must("fi_passive_ep", fi_passive_ep(fabric, msg, &pep, NULL));
	must("fi_endpoint", fi_endpoint(domain, msg, &connected, NULL));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("fi_enable", fi_enable(ep));
	known(av, ep);
	must("fi_av_set", fi_av_set(av, &set_attr, &set, NULL));

	base("fabric", &fabric->fid);
	TABLE("fabric", fabric->ops, fi_ops_fabric);
	base("domain", &domain->fid);
	TABLE("domain", domain->ops, fi_ops_domain);
	TABLE("domain", domain->mr, fi_ops_mr);
	base("wait", &wait->fid);
	TABLE("wait", wait->ops, fi_ops_wait);
	base("poll", &poll->fid);
	TABLE("poll", poll->ops, fi_ops_poll);
	base("eq", &eq->fid);
	TABLE("eq", eq->ops, fi_ops_eq);
	base("cq", &cq->fid);
	TABLE("cq", cq->ops, fi_ops_cq);
	base("cntr", &cntr->fid);
	TABLE("cntr", cntr->ops, fi_ops_cntr);
	base("av", &av->fid);
	TABLE("av", av->ops, fi_ops_av);
	base("av_set", &set->fid);
	TABLE("av_set", set->ops, fi_ops_av_set);
	base("mr", &mr->fid);
	base("stx", &stx->fid);
	TABLE("stx", stx->ops, fi_ops_ep);
	base("pep", &pep->fid);
	TABLE("pep", pep->ops, fi_ops_ep);
	TABLE("pep", pep->cm, fi_ops_cm);
	base("nic", &info->nic->fid);
	endpoint("ep", ep);
	endpoint("sep", sep);
	endpoint("tx", tx);
	endpoint("rx", rx);
	endpoint("srx", srx);
	endpoint("msg ep", connected);
	/* An entry of the headers that no call leads to. */
	expect("the collective of a message", ep->collective->msg(ep, NULL, NULL, NULL, 0, 0), -FI_ENOSYS);
	expect("objects", objects, 19);
	expect("tables and entries", tables > 60 && entries > 400, 1);

	must("close", fi_close(&set->fid));
	must("close", fi_close(&connected->fid));
	must("close", fi_close(&pep->fid));
	must("close", fi_close(&rx->fid));
	must("close", fi_close(&tx->fid));
	must("close", fi_close(&sep->fid));
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&srx->fid));
	must("close", fi_close(&stx->fid));
	must("close", fi_close(&mr->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&cntr->fid));
	must("close", fi_close(&poll->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&eq->fid));
	must("close", fi_close(&wait->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(msg);
	printf("ok end\n");
	return bad != 0;
}
