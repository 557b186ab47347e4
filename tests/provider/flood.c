/*
 * A station that asks a listener after connections that it has not got, and takes none of the
 * answers: who is refused meanwhile hears of it. One line for each check: "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include "check.h"

enum { QUESTIONS = 2000, SECONDS = 20 };

static struct fid_fabric *fabric;
static struct fid_eq *eq;
static struct fid_cq *cq, *liar_cq;
static struct fid_av *av;

static struct fi_info *ask(enum fi_ep_type type, uint64_t flags, const char *service)
{
	struct fi_info *hints = fi_allocinfo(), *found;
	hints->caps = FI_MSG;
	hints->ep_attr->type = type;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, service, flags, hints, &found));
	fi_freeinfo(hints);
	return found;
}

static struct fid_ep *open_ep(struct fi_info *info, struct fid_cq **queue)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	struct fid_domain *domain;
	struct fid_ep *ep;

	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &attr, queue, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &(*queue)->fid, FI_TRANSMIT | FI_RECV));
	if (info->ep_attr->type == FI_EP_MSG) {
		must("bind", fi_ep_bind(ep, &eq->fid, 0));
		return ep;
	}
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	return ep;
}

/* A turn of everybody, and the next event: -1 for an error, 0 for none. */
static long event(struct fi_eq_cm_entry *entry)
{
	struct fi_cq_entry unused;
	uint32_t number = 0;
	ssize_t n;

	fi_cq_read(liar_cq, &unused, 1);
	fi_cq_read(cq, &unused, 1);
	n = fi_eq_read(eq, &number, entry, sizeof *entry, 0);
	return n == -FI_EAVAIL ? -1 : n < 0 ? 0 : (long) number;
}

static long next(struct fi_eq_cm_entry *entry)
{
	double end = now() + SECONDS;
	long got;

	while (!(got = event(entry)) && now() < end)
		;
	return got;
}

int main(void)
{
	struct fi_info *here = ask(FI_EP_MSG, FI_SOURCE, "14791"), *info = ask(FI_EP_MSG, 0, NULL);
	struct fi_info *any = ask(FI_EP_RDM, 0, NULL);
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	/* ALIVE of the connections between sides: kind, version, and both addresses. */
	unsigned char question[48] = { 5, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8 };
	struct fi_eq_err_entry err = { 0 };
	struct fi_eq_cm_entry entry;
	struct fid_ep *liar, *client;
	struct fid_pep *pep;
	char server[64];
	size_t len = sizeof server, own = 16;
	fi_addr_t to;
	int asked = 0;

	must("fi_fabric", fi_fabric(here->fabric_attr, &fabric, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
	must("fi_passive_ep", fi_passive_ep(fabric, here, &pep, NULL));
	must("bind", fi_pep_bind(pep, &eq->fid, 0));
	must("fi_listen", fi_listen(pep));
	must("fi_getname", fi_getname(&pep->fid, server, &len));
	client = open_ep(info, &cq);
	setenv("FI_BAREWIRE_UNEXPECTED_BYTES", "16384", 1);
	liar = open_ep(any, &liar_cq);
	must("fi_getname", fi_getname(&liar->fid, question + 16, &own));
	memcpy(question + 32, question + 16, 16);
	if (fi_av_insert(av, server, 1, &to, 0, NULL) != 1)
		must("fi_av_insert", -1);
	for (double end = now() + SECONDS; asked < QUESTIONS && now() < end; event(&entry))
		asked += fi_inject(liar, question, sizeof question, to) == 0;
	expect("all is asked", asked, QUESTIONS);
	for (int turn = 0; turn < 2000; turn++)
		event(&entry);

	must("fi_connect", fi_connect(client, server, NULL, 0));
	expect("a request", next(&entry), FI_CONNREQ);
	must("fi_reject", fi_reject(pep, entry.info->handle, NULL, 0));
	expect("a refusal", next(&entry), -1);
	must("fi_eq_readerr", fi_eq_readerr(eq, &err, 0));
	expect("it is for the client", err.fid == &client->fid && err.err == FI_ECONNREFUSED, 1);
	printf("ok end\n");
	return 0;
}
