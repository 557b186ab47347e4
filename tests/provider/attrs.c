/*
 * Objects that are opened with more than fi_getinfo offers. One line for each check: "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "check.h"

static struct fid_fabric *fabric;
static struct fid_domain *domain;

static struct fi_info *ask(enum fi_ep_type type)
{
	struct fi_info *hints = fi_allocinfo(), *found;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA;
	hints->ep_attr->type = type;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &found));
	fi_freeinfo(hints);
	return found;
}

/* Opens the object that is named, and closes it again. */
static int opens(const char *what, struct fi_info *info)
{
	union {
		struct fid_domain *domain;
		struct fid_ep *ep;
		struct fid_pep *pep;
	} out;
	int ret;

	if (!strcmp(what, "fi_domain")) {
		ret = fi_domain(fabric, info, &out.domain, NULL);
		return ret ? ret : fi_close(&out.domain->fid);
	}
	if (!strcmp(what, "fi_passive_ep")) {
		ret = fi_passive_ep(fabric, info, &out.pep, NULL);
		return ret ? ret : fi_close(&out.pep->fid);
	}
	ret = !strcmp(what, "fi_endpoint") ? fi_endpoint(domain, info, &out.ep, NULL)
					   : fi_scalable_ep(domain, info, &out.ep, NULL);
	return ret ? ret : fi_close(&out.ep->fid);
}

/* With `member` of `info` changed. */
#define WITH(what, info, member, value, want)                               \
	do {                                                                \
		__typeof__((info)->member) kept_ = (info)->member;          \
		(info)->member = (value);                                   \
		expect(what ": " #member, opens(what, info), want);         \
		(info)->member = kept_;                                     \
	} while (0)

#define REFUSES(what, info, member, value) WITH(what, info, member, value, -FI_EINVAL)

#define ENDPOINT(what, info)                                                \
	do {                                                                \
		expect(what " as offered", opens(what, info), 0);           \
		REFUSES(what, info, caps, (info)->caps | FI_HMEM);          \
		/* A capability of 2.0. */                                  \
		REFUSES(what, info, caps, (info)->caps | 1ULL << 45);       \
		REFUSES(what, info, tx_attr->caps, FI_MSG | FI_HMEM);       \
		REFUSES(what, info, tx_attr->size, 1 << 20);                \
		REFUSES(what, info, tx_attr->inject_size, (info)->tx_attr->inject_size + 1); \
		REFUSES(what, info, tx_attr->iov_limit, (info)->tx_attr->iov_limit + 1); \
		REFUSES(what, info, tx_attr->rma_iov_limit, (info)->tx_attr->rma_iov_limit + 1); \
		REFUSES(what, info, tx_attr->msg_order, FI_ORDER_WAR);      \
		REFUSES(what, info, tx_attr->comp_order, FI_ORDER_STRICT);  \
		REFUSES(what, info, rx_attr->caps, FI_MSG | FI_HMEM);       \
		REFUSES(what, info, rx_attr->size, 1 << 20);                \
		REFUSES(what, info, rx_attr->iov_limit, (info)->rx_attr->iov_limit + 1); \
		REFUSES(what, info, ep_attr->protocol, 12345);              \
		REFUSES(what, info, ep_attr->max_msg_size, SIZE_MAX);       \
		WITH(what, info, tx_attr->op_flags, FI_PEEK, -FI_EBADFLAGS); \
		WITH(what, info, tx_attr->size, 1, 0);                      \
		WITH(what, info, rx_attr->caps, 0, 0);                      \
		WITH(what, info, rx_attr->size, 0, 0);                      \
	} while (0)

static void domains(struct fi_info *info)
{
	expect("fi_domain as offered", opens("fi_domain", info), 0);
	REFUSES("fi_domain", info, domain_attr->cq_cnt, info->domain_attr->cq_cnt + 1);
	REFUSES("fi_domain", info, domain_attr->ep_cnt, info->domain_attr->ep_cnt + 1);
	REFUSES("fi_domain", info, domain_attr->cntr_cnt, info->domain_attr->cntr_cnt + 1);
	REFUSES("fi_domain", info, domain_attr->tx_ctx_cnt, info->domain_attr->tx_ctx_cnt + 1);
	REFUSES("fi_domain", info, domain_attr->rx_ctx_cnt, info->domain_attr->rx_ctx_cnt + 1);
	REFUSES("fi_domain", info, domain_attr->max_ep_tx_ctx, 257);
	REFUSES("fi_domain", info, domain_attr->max_ep_srx_ctx, 1 << 20);
	REFUSES("fi_domain", info, domain_attr->mr_iov_limit, 9);
	REFUSES("fi_domain", info, domain_attr->mr_key_size, 9);
	REFUSES("fi_domain", info, domain_attr->cq_data_size, 9);
	REFUSES("fi_domain", info, domain_attr->max_err_data, 1 << 10);
	REFUSES("fi_domain", info, domain_attr->caps, FI_SHARED_AV);
	REFUSES("fi_domain", info, domain_attr->threading, 99);
	WITH("fi_domain", info, domain_attr->cq_cnt, 1, 0);
	WITH("fi_domain", info, domain_attr->mr_key_size, 1, 0);
}

static void contexts(struct fi_info *info)
{
	struct fi_rx_attr rx = { .size = 1 << 20 };
	struct fi_tx_attr tx = { .inject_size = 1 << 20 };
	struct fid_ep *sep, *ep;
	struct fid_stx *stx;

	expect("fi_srx_context", fi_srx_context(domain, &rx, &ep, NULL), -FI_EINVAL);
	expect("fi_stx_context", fi_stx_context(domain, &tx, &stx, NULL), -FI_EINVAL);
	must("fi_scalable_ep", fi_scalable_ep(domain, info, &sep, NULL));
	expect("fi_tx_context", fi_tx_context(sep, 0, &tx, &ep, NULL), -FI_EINVAL);
	expect("fi_rx_context", fi_rx_context(sep, 0, &rx, &ep, NULL), -FI_EINVAL);
	rx.size = tx.inject_size = 8;
	must("fi_tx_context", fi_tx_context(sep, 0, &tx, &ep, NULL));
	must("close", fi_close(&ep->fid));
	must("fi_rx_context", fi_rx_context(sep, 0, &rx, &ep, NULL));
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&sep->fid));
}

int main(void)
{
	struct fi_info *rdm = ask(FI_EP_RDM), *msg = ask(FI_EP_MSG);

	must("fi_fabric", fi_fabric(rdm->fabric_attr, &fabric, NULL));
	domains(rdm);
	must("fi_domain", fi_domain(fabric, rdm, &domain, NULL));
	ENDPOINT("fi_endpoint", rdm);
	ENDPOINT("fi_endpoint", msg);
	ENDPOINT("fi_scalable_ep", rdm);
	ENDPOINT("fi_passive_ep", msg);
	contexts(rdm);
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(rdm);
	fi_freeinfo(msg);
	printf("ok end\n");
	return bad != 0;
}
