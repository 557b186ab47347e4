/*
 * Random hints for fi_getinfo: what is answered is no less than what was asked for, and good as
 * hints again. One line for each check that fails: "BAD NAME: got X, want Y".
 */
#include <stddef.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "check.h"

enum { ROUNDS = 1500, OPENED = 150 };

/* Numbers of which an answer has as much as a hint, and how much is there. */
#define NUMBER(of, member, most) \
	{ offsetof(struct fi_info, of##_attr), offsetof(struct fi_##of##_attr, member), most, \
	  #of "_attr->" #member }
static const struct number {
	size_t attr, member, most;
	const char *name;
} numbers[] = {
	NUMBER(tx, size, 65536), NUMBER(tx, inject_size, 256), NUMBER(tx, iov_limit, 8),
	NUMBER(tx, rma_iov_limit, 8), NUMBER(rx, size, 65536), NUMBER(rx, iov_limit, 8),
	NUMBER(ep, max_msg_size, 65536), NUMBER(ep, max_order_raw_size, 65536),
	NUMBER(ep, max_order_war_size, 65536), NUMBER(ep, max_order_waw_size, 65536),
	NUMBER(domain, mr_key_size, 8), NUMBER(domain, cq_data_size, 8), NUMBER(domain, cq_cnt, 65536),
	NUMBER(domain, ep_cnt, 65536), NUMBER(domain, tx_ctx_cnt, 65536),
	NUMBER(domain, rx_ctx_cnt, 65536), NUMBER(domain, max_ep_tx_ctx, 256),
	NUMBER(domain, max_ep_rx_ctx, 256), NUMBER(domain, max_ep_stx_ctx, 65536),
	NUMBER(domain, max_ep_srx_ctx, 65536), NUMBER(domain, cntr_cnt, 65536),
	NUMBER(domain, mr_iov_limit, 8), NUMBER(domain, max_err_data, 16),
	NUMBER(domain, mr_cnt, 1 << 20),
};

enum { NUMBERS = sizeof numbers / sizeof *numbers };

static uint64_t state = 88172645463325252;

/* Below `n`. */
static uint64_t random_below(uint64_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % n;
}

/* Some of the bits. */
static uint64_t some(uint64_t of)
{
	return of & random_below(UINT64_MAX) & random_below(UINT64_MAX);
}

static size_t *at(struct fi_info *info, const struct number *n)
{
	char *attr = *(char **) ((char *) info + n->attr);

	return (size_t *) (attr + n->member);
}

static struct fi_info *random_hints(void)
{
	const uint64_t caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_SEND | FI_RECV | FI_READ
			      | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_MULTI_RECV | FI_SOURCE
			      | FI_SOURCE_ERR | FI_DIRECTED_RECV | FI_RMA_EVENT | FI_TRIGGER | FI_FENCE
			      | FI_LOCAL_COMM | FI_REMOTE_COMM | FI_NAMED_RX_CTX;
	const uint64_t orders = FI_ORDER_SAS | FI_ORDER_SAW | FI_ORDER_WAW | FI_ORDER_WAS
				| FI_ORDER_RAW | FI_ORDER_RAS | FI_ORDER_ATOMIC_RAR;
	struct fi_info *hints = fi_allocinfo();
	struct fi_domain_attr *domain = hints->domain_attr;

	hints->fabric_attr->prov_name = strdup("barewire");
	hints->caps = some(caps);
	hints->mode = random_below(2) ? UINT64_MAX : 0;
	hints->addr_format = random_below(2) ? FI_FORMAT_UNSPEC : FI_SOCKADDR_IN;
	hints->ep_attr->type = (enum fi_ep_type) random_below(FI_EP_RDM + 1);
	hints->tx_attr->op_flags = some(FI_COMPLETION | FI_INJECT | FI_DELIVERY_COMPLETE);
	hints->rx_attr->op_flags = some(FI_COMPLETION | FI_MULTI_RECV);
	hints->tx_attr->msg_order = some(orders);
	hints->rx_attr->msg_order = some(orders);
	domain->threading = (enum fi_threading) random_below(FI_THREAD_ENDPOINT + 1);
	domain->control_progress = (enum fi_progress) random_below(FI_PROGRESS_MANUAL + 1);
	domain->data_progress = (enum fi_progress) random_below(FI_PROGRESS_MANUAL + 1);
	domain->resource_mgmt = (enum fi_resource_mgmt) random_below(FI_RM_ENABLED + 1);
	domain->av_type = (enum fi_av_type) random_below(FI_AV_TABLE + 1);
	domain->mr_mode = (int) random_below(3);
	for (const struct number *n = numbers; n < numbers + NUMBERS; n++)
		if (random_below(4) == 0)
			*at(hints, n) = 1 + random_below(n->most);
	return hints;
}

/* Says so of what is not as it should be: of thousands of checks the good ones are not told. */
static void same(const char *name, uint64_t got, uint64_t want)
{
	if (got != want)
		expect(name, (long) got, (long) want);
}

/* An answer to hints. What was left open may be anything. */
static void compare(struct fi_info *found, struct fi_info *hints, uint32_t version)
{
	struct fi_domain_attr *is = found->domain_attr, *asked = hints->domain_attr;
	/* The members from here on are those of 1.5. */
	const size_t last = FI_VERSION_LT(version, FI_VERSION(1, 5)) ? NUMBERS - 2 : NUMBERS;

	same("caps", found->caps & hints->caps, hints->caps);
	same("mode", found->mode & ~hints->mode, 0);
	same("tx_attr->caps", found->tx_attr->caps & ~found->caps, 0);
	same("rx_attr->caps", found->rx_attr->caps & ~found->caps, 0);
	same("tx_attr->op_flags", found->tx_attr->op_flags, hints->tx_attr->op_flags);
	same("rx_attr->op_flags", found->rx_attr->op_flags, hints->rx_attr->op_flags);
	same("tx_attr->msg_order", hints->tx_attr->msg_order & ~found->tx_attr->msg_order, 0);
	same("rx_attr->msg_order", hints->rx_attr->msg_order & ~found->rx_attr->msg_order, 0);
#define AS_ASKED(what) same(#what, asked->what ? is->what : 0, asked->what)
	AS_ASKED(threading);
	AS_ASKED(control_progress);
	AS_ASKED(data_progress);
	AS_ASKED(resource_mgmt);
	AS_ASKED(av_type);
	AS_ASKED(mr_mode);
	for (const struct number *n = numbers; n < numbers + last; n++)
		if (*at(found, n) < *at(hints, n))
			expect(n->name, (long) *at(found, n), (long) *at(hints, n));
}

/* Opens and closes a domain and an endpoint of an answer. */
static void opens(struct fi_info *info)
{
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_ep *ep;

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
}

int main(void)
{
	long answers = 0;

	for (int round = 0; round < ROUNDS && bad < 20; round++) {
		struct fi_info *hints = random_hints(), *found, *again;
		uint32_t version = FI_VERSION(1, random_below(18));

		if (fi_getinfo(version, NULL, NULL, 0, hints, &found) == 0) {
			compare(found, hints, version);
			must("an answer as hints",
			     fi_getinfo(version, NULL, NULL, 0, found, &again));
			compare(again, found, version);
			compare(found, again, version);
			if (answers++ < OPENED)
				opens(found);
			fi_freeinfo(found);
			fi_freeinfo(again);
		}
		fi_freeinfo(hints);
	}
	expect("most hints have an answer", answers > ROUNDS / 2, 1);
	printf("ok end\n");
	return bad != 0;
}
