/*
 * tenants: domains with an `auth_key`. One line for each check: "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>

#include "check.h"

struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	unsigned char name[16];
};

/* The answer to hints with a key of `len` bytes `byte`, or an error. */
static int ask(unsigned char byte, size_t len, struct fi_info **info)
{
	struct fi_info *hints = fi_allocinfo();
	int ret;

	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	if (len) {
		hints->domain_attr->auth_key = malloc(len);
		memset(hints->domain_attr->auth_key, byte, len);
		hints->domain_attr->auth_key_size = len;
	}
	ret = fi_getinfo(fi_version(), NULL, NULL, 0, hints, info);
	fi_freeinfo(hints);
	return ret;
}

static void open_side(struct side *s, unsigned char byte, size_t len)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_MSG };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	size_t name_len = sizeof s->name;

	must("fi_getinfo", ask(byte, len, &s->info));
	expect("the answer has the key", s->info->domain_attr->auth_key_size, len);
	must("fi_fabric", fi_fabric(s->info->fabric_attr, &s->fabric, NULL));
	must("fi_domain", fi_domain(s->fabric, s->info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, s->info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
	must("fi_getname", fi_getname(&s->ep->fid, s->name, &name_len));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
	must("close", fi_close(&s->fabric->fid));
	fi_freeinfo(s->info);
}

/* How the next operation of `s` ends: 0, or its error. */
static int outcome(struct side *s, struct side *other)
{
	struct fi_cq_msg_entry entry;

	for (double end = now() + 10; now() < end;) {
		struct fi_cq_err_entry e = { 0 };
		ssize_t n = fi_cq_read(s->cq, &entry, 1);
		if (n == 1)
			return 0;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
			return e.err;
		}
		fi_cq_read(other->cq, &entry, 0);
	}
	return FI_ETIMEDOUT;
}

/* What a message between domains with these keys brings, and after how long. */
static void meet(const char *what, const unsigned char bytes[2], const size_t lens[2], int want)
{
	struct side a, b;
	char in[8] = "";
	fi_addr_t to;
	double begun;

	open_side(&a, bytes[0], lens[0]);
	open_side(&b, bytes[1], lens[1]);
	must("fi_av_insert", fi_av_insert(a.av, b.name, 1, &to, 0, NULL) - 1);
	must("fi_recv", fi_recv(b.ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	begun = now();
	must("fi_send", fi_send(a.ep, "hello", 6, NULL, to, NULL));
	expect(what, outcome(&a, &b), want);
	if (want) {
		double took = now() - begun;
		expect("after a second", took > 0.9 && took < 2, 1);
	} else {
		expect("it is received", outcome(&b, &a), 0);
		expect("whole", strcmp(in, "hello"), 0);
	}
	close_side(&a);
	close_side(&b);
}

int main(void)
{
	struct fi_info *info = NULL;

	expect("a key of 15 bytes", ask(1, 15, &info), -FI_ENODATA);
	expect("a key of 1,025 bytes", ask(1, 1025, &info), -FI_ENODATA);
	meet("one key", (const unsigned char[]) { 1, 1 }, (const size_t[]) { 16, 16 }, 0);
	meet("two keys", (const unsigned char[]) { 1, 2 }, (const size_t[]) { 32, 32 }, FI_EACCES);
	meet("a key and none", (const unsigned char[]) { 1, 0 }, (const size_t[]) { 32, 0 }, FI_ENOKEY);
	meet("none and a key", (const unsigned char[]) { 0, 1 }, (const size_t[]) { 0, 32 }, FI_ENOKEY);
	printf("ok end\n");
	return bad != 0;
}
