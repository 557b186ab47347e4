/*
 * clients PROVIDER INTERFACE IP: what programs that cannot run here ask fi_getinfo for, as their
 * sources have it, and whether PROVIDER is an answer; if it is, the objects that they open, with
 * their attributes. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_rma.h>

#include "check.h"

/* Numbers that a header may be too old to name. */
enum { PROTO_XNET = 25, PROTO_RXM = 11 };

/* They ask for 1.18 or later, which an older library refuses. */
static uint32_t at_most(int minor)
{
	uint32_t own = fi_version();

	return own < FI_VERSION(1, minor) ? own : FI_VERSION(1, minor);
}

/* The answer of the provider, the first of its own; NULL if there is none. */
static struct fi_info *asked(uint32_t version, struct fi_info *hints, const char *prov)
{
	struct fi_info *all = NULL, *own;

	if (fi_getinfo(version, NULL, NULL, 0, hints, &all))
		return NULL;
	for (own = all; own && strcmp(own->fabric_attr->prov_name, prov); own = own->next)
		;
	own = own ? fi_dupinfo(own) : NULL;
	fi_freeinfo(all);
	return own;
}

/* Opens what a program opens before it talks, and closes it again. */
static void opens(const char *who, struct fi_info *info, struct fi_cq_attr *cq_attr, int has_memory)
{
	struct fi_av_attr av_attr = { 0 };
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_ep *ep;
	struct fid_mr *mr;
	static char memory[8192];
	char name[256];
	size_t len = sizeof name;

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	must("fi_getname", fi_getname(&ep->fid, name, &len));
	if (has_memory) {
		/* A key that is the address of the memory, as NIXL's over tcp. */
		uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
		uint64_t key = (uintptr_t) memory;

		must("fi_mr_reg", fi_mr_reg(domain, memory, sizeof memory, access, 0, key, 0, &mr, NULL));
		expect("the key of a region", fi_mr_key(mr) == key, 1);
		must("close", fi_close(&mr->fid));
		must("fi_mr_reg", fi_mr_reg(domain, memory, sizeof memory, FI_SEND | FI_RECV, 0, 0, 0,
					    &mr, NULL));
		must("close", fi_close(&mr->fid));
	}
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	printf("ok what %s opens\n", who);
}

/* NIXL: a list of all providers and devices, then the first of tcp, without GPU memory. */
static void nixl(const char *prov)
{
	struct fi_cq_attr cq_attr = {
		.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE, .size = 12288
	};
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA | FI_LOCAL_COMM | FI_REMOTE_COMM;
	hints->mode = FI_CONTEXT;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = ~3;
	info = asked(at_most(18), hints, prov);
	expect("NIXL's list of devices has it", !!info, 1);
	if (!info)
		return;
	hints->domain_attr->name = strdup(info->domain_attr->name);
	fi_freeinfo(info);

	hints->caps |= FI_HMEM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED;
	hints->domain_attr->threading = FI_THREAD_COMPLETION;
	expect("NIXL with memory of a GPU", !!asked(at_most(18), hints, prov), 0);
	hints->caps &= ~FI_HMEM;
	info = asked(at_most(18), hints, prov);
	expect("NIXL with memory of the host", !!info, 1);
	if (info)
		opens("NIXL", info, &cq_attr, 1);
	fi_freeinfo(info);
	fi_freeinfo(hints);
}

/* aws-ofi-nccl: its protocol of RDMA has GPU memory; that of messages has a form without. */
static void nccl(const char *prov)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_MSG | FI_RMA | FI_HMEM | FI_LOCAL_COMM | FI_REMOTE_COMM;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_HMEM | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED |
				      FI_MR_PROV_KEY | FI_MR_ENDPOINT;
	hints->domain_attr->threading = FI_THREAD_COMPLETION;
	hints->domain_attr->cq_data_size = 4;
	expect("aws-ofi-nccl, RDMA", !!asked(at_most(18), hints, prov), 0);

	hints->caps = FI_LOCAL_COMM | FI_REMOTE_COMM | FI_TAGGED | FI_MSG | FI_HMEM;
	hints->domain_attr->threading = FI_THREAD_SAFE;
	hints->domain_attr->cq_data_size = 0;
	hints->tx_attr->msg_order = FI_ORDER_SAS;
	hints->rx_attr->msg_order = FI_ORDER_SAS;
	expect("aws-ofi-nccl, messages, GPU memory", !!asked(FI_VERSION(1, 6), hints, prov), 0);
	hints->caps &= ~FI_HMEM;
	hints->domain_attr->mr_mode &= ~FI_MR_HMEM;
	info = asked(FI_VERSION(1, 6), hints, prov);
	expect("aws-ofi-nccl, messages", !!info, 1);
	if (info)
		opens("aws-ofi-nccl", info, &cq_attr, 0);
	fi_freeinfo(info);
	fi_freeinfo(hints);
}

/* CaRT: Mercury's requests, of a server that drives each of its domains by one thread. */
static void cart(const char *prov, const char *interface, const char *ip)
{
	struct fi_cq_attr cq_attr = {
		.format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_FD, .size = 131072
	};
	struct fi_info *hints = fi_allocinfo(), *info;
	struct sockaddr_in own = { .sin_family = AF_INET };

	expect("an address", inet_pton(AF_INET, ip, &own.sin_addr), 1);
	hints->fabric_attr->prov_name = strdup(prov);
	hints->mode = FI_ASYNC_IOV | FI_CONTEXT;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->protocol = strchr(prov, ';') ? PROTO_RXM : PROTO_XNET;
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_DIRECTED_RECV | FI_MULTI_RECV;
	hints->tx_attr->op_flags = FI_INJECT_COMPLETE;
	hints->tx_attr->size = 4096;
	hints->rx_attr->size = 512;
	hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
	hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
				      FI_MR_LOCAL | FI_MR_ENDPOINT;
	hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->addr_format = FI_SOCKADDR_IN;
	hints->src_addr = memcpy(malloc(sizeof own), &own, sizeof own);
	hints->src_addrlen = sizeof own;
	info = asked(at_most(13), hints, prov);
	expect("CaRT", !!info, 1);
	if (info) {
		expect("CaRT's domain", strcmp(info->domain_attr->name, interface), 0);
		opens("CaRT", info, &cq_attr, 0);
	}
	fi_freeinfo(info);
	fi_freeinfo(hints);
}

/* lnx links providers that take the queues of a peer (FI_PEER), by their names. */
static void lnx(const char *prov)
{
	struct fi_info *hints = fi_allocinfo();

	hints->fabric_attr->prov_name = strdup(prov);
	hints->caps = FI_MSG | FI_TAGGED;
	hints->ep_attr->type = FI_EP_RDM;
	expect("what lnx asks for, but FI_PEER", !!asked(at_most(17), hints, prov), 1);
	hints->caps |= FI_PEER;
	expect("what lnx asks for", !!asked(at_most(17), hints, prov), 0);
	fi_freeinfo(hints);
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	nixl(argv[1]);
	nccl(argv[1]);
	cart(argv[1], argv[2], argv[3]);
	lnx(argv[1]);
	printf(bad ? "BAD end\n" : "ok end\n");
	return bad != 0;
}
