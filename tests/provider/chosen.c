/*
 * chosen PROVIDER INTERFACE IP [PEER]: a client of a provider that it chose by its name, as Mercury
 * does: it knows the number of the protocol, looks for the domain that is called as the interface
 * with its own address, and tells others where it is by the text of that address, "IP:PORT". Who
 * has a PEER sends first. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_tagged.h>

#include "check.h"

/* Numbers that a header may be too old to name. */
enum { PROTO_RXM = 11, PROTO_XNET = 25 };

static struct fid_cq *cq;
static struct fid_ep *ep;

/* Waits for one completion. */
static void wait_one(const char *what)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e = { 0 };

	for (double end = now() + 20; now() < end;) {
		ssize_t n = fi_cq_read(cq, &entry, 1);
		if (n == 1)
			return;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(cq, &e, 0));
			must(what, -e.err);
		}
	}
	must(what, -FI_ETIMEDOUT);
}

/* A sockaddr of "IP:PORT", and of nothing else. */
static struct sockaddr_in at(const char *text)
{
	struct sockaddr_in in = { .sin_family = AF_INET };
	char ip[64];
	unsigned port;

	expect("an address", sscanf(text, "%63[^:]:%u", ip, &port), 2);
	expect("an address in numbers", inet_pton(AF_INET, ip, &in.sin_addr), 1);
	in.sin_port = htons(port);
	return in;
}

int main(int argc, char **argv)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	struct fi_info *hints = fi_allocinfo(), *info;
	int is_layered = !!strchr(argv[1], ';'), sends = argc > 4;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct sockaddr_in own, peer;
	char text[128], said[128];
	size_t len = sizeof own;
	fi_addr_t to;

	snprintf(text, sizeof text, "%s:0", argv[3]);
	own = at(text);
	hints->fabric_attr->prov_name = strdup(argv[1]);
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = is_layered ? PROTO_RXM : PROTO_XNET;
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_DIRECTED_RECV | FI_MULTI_RECV;
	hints->mode = FI_CONTEXT | FI_ASYNC_IOV;
	hints->addr_format = FI_SOCKADDR_IN;
	hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
				      FI_MR_LOCAL | FI_MR_ENDPOINT;
	hints->src_addr = memcpy(malloc(sizeof own), &own, sizeof own);
	hints->src_addrlen = sizeof own;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 13), NULL, NULL, 0, hints, &info));
	expect("the provider", strcmp(info->fabric_attr->prov_name, argv[1]), 0);
	expect("the domain", strcmp(info->domain_attr->name, argv[2]), 0);
	expect("the protocol", info->ep_attr->protocol, hints->ep_attr->protocol);
	expect("the format", info->addr_format, FI_SOCKADDR_IN);
	expect("one answer", info->next == NULL, 1);

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	must("fi_getname", fi_getname(&ep->fid, &own, &len));
	len = sizeof text;
	expect("fi_av_straddr", fi_av_straddr(av, &own, text, &len) == text, 1);
	expect("the text of an address", strncmp(text, "fi_sockaddr_in://", 17), 0);
	expect("the length of a text", len, strlen(text) + 1);

	must("fi_trecv", fi_trecv(ep, said, sizeof said, NULL, FI_ADDR_UNSPEC, 7, 0, NULL));
	printf("at %s\n", text + 17);
	fflush(stdout);
	if (!sends)
		wait_one("the peer's message");
	peer = at(sends ? argv[4] : said);
	expect("fi_av_insert", fi_av_insert(av, &peer, 1, &to, 0, NULL), 1);
	must("fi_tsend", fi_tsend(ep, text + 17, len - 17, NULL, to, 7, NULL));
	wait_one("a message");
	if (sends)
		wait_one("the answer");

	must("close", fi_close(&ep->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf(bad ? "BAD end\n" : "ok end\n");
	return bad != 0;
}
