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

	hints->caps = FI_MSG | FI_RMA | FI_DIRECTED_RECV | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	if (len == SIZE_MAX) {
		hints->domain_attr->auth_key_size = len;
	} else if (len) {
		hints->domain_attr->auth_key = malloc(len);
		memset(hints->domain_attr->auth_key, byte, len);
		hints->domain_attr->auth_key_size = len;
	}
	ret = fi_getinfo(fi_version(), NULL, NULL, 0, hints, info);
	fi_freeinfo(hints);
	return ret;
}

/* What 1.20 appended to the table of address vectors. */
struct ops_av {
	size_t size;
	void *before[7];
	int (*insert_auth_key)(struct fid_av *av, const void *key, size_t len, fi_addr_t *fi_addr,
			       uint64_t flags);
	int (*lookup_auth_key)(struct fid_av *av, fi_addr_t addr, void *key, size_t *len);
};

static struct ops_av *late(struct fid_av *av)
{
	return (struct ops_av *) av->ops;
}

/* What 1.20 appended to the attributes of a domain. */
struct domain_attr {
	struct fi_domain_attr before;
	size_t max_ep_auth_key;
};

/* struct fi_mr_auth_key. */
struct mr_key {
	struct fid_av *av;
	fi_addr_t src_addr;
};

#define KEY_FLAG (1ULL << 57)

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

/* A second endpoint that names a key of `len` bytes `byte`. */
static int endpoint(struct side *s, unsigned char byte, size_t len)
{
	struct fi_info *info = fi_dupinfo(s->info);
	struct fid_ep *ep;
	int ret;

	info->ep_attr->auth_key = malloc(len);
	memset(info->ep_attr->auth_key, byte, len);
	info->ep_attr->auth_key_size = len;
	ret = fi_endpoint(s->domain, info, &ep, NULL);
	fi_freeinfo(info);
	if (!ret)
		must("close", fi_close(&ep->fid));
	return ret;
}

static int region(struct side *s, const void *key, size_t len, uint64_t flags)
{
	static char memory[64];
	struct iovec iov = { memory, sizeof memory };
	struct fi_mr_attr attr = { .mr_iov = &iov, .iov_count = 1, .access = FI_REMOTE_READ,
		.auth_key = (uint8_t *) key, .auth_key_size = len };
	struct fid_mr *mr;
	int ret = fi_mr_regattr(s->domain, &attr, flags, &mr);

	if (!ret)
		must("close", fi_close(&mr->fid));
	return ret;
}

/* Endpoints and regions have the key of their domain, and may name it. */
static void same_key(void)
{
	struct side s;
	unsigned char key[32], other[32];
	struct fi_info *hints = fi_allocinfo(), *info = NULL;

	memset(key, 1, 32);
	memset(other, 2, 32);
	open_side(&s, 1, 32);
	expect("an endpoint with the domain's key", endpoint(&s, 1, 32), 0);
	expect("an endpoint with another key", endpoint(&s, 2, 32), -FI_EINVAL);
	expect("an endpoint with a short key", endpoint(&s, 1, 3), -FI_EINVAL);
	expect("a region with the domain's key", region(&s, key, 32, 0), 0);
	expect("a region with another key", region(&s, other, 32, 0), -FI_EINVAL);
	expect("a region with no key", region(&s, NULL, 0, 0), 0);
	close_side(&s);

	hints->fabric_attr->prov_name = strdup("barewire");
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->auth_key = malloc(32);
	memset(hints->ep_attr->auth_key, 1, 32);
	hints->ep_attr->auth_key_size = 32;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	expect("a key of the endpoint is its domain's", info->domain_attr->auth_key_size, 32);
	fi_freeinfo(info);
	hints->domain_attr->auth_key = malloc(32);
	memset(hints->domain_attr->auth_key, 2, 32);
	hints->domain_attr->auth_key_size = 32;
	expect("two keys", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info), -FI_ENODATA);
	fi_freeinfo(hints);
}

/* A message that has come: its context, and its source. */
static void come(const char *what, struct side *s, struct side *other, void *context, fi_addr_t from)
{
	struct fi_cq_msg_entry entry;
	fi_addr_t src;

	for (double end = now() + 10; now() < end;) {
		if (fi_cq_readfrom(s->cq, &entry, 1, &src) == 1) {
			if (!(entry.flags & FI_RECV))
				continue;
			expect(what, entry.op_context == context, 1);
			expect("its source", src, from);
			return;
		}
		fi_cq_read(other->cq, &entry, 0);
	}
	expect(what, FI_ETIMEDOUT, 0);
}

static ssize_t recv_of(struct side *s, char *in, fi_addr_t key, void *context, uint64_t flags)
{
	struct iovec iov = { in, 8 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = key, .context = context };

	return fi_recvmsg(s->ep, &msg, flags);
}

/* One endpoint with the keys of two tenants, and an endpoint of each of them. */
static void several_keys(void)
{
	struct side host, one, two;
	char in[3][8] = { "", "", "" };
	unsigned char key[32], back[64];
	size_t len = sizeof back;
	fi_addr_t keys[3], to_one = 0, to_two = 0, at_one, at_two, there;
	struct fi_av_attr as = { .type = FI_AV_TABLE };
	struct fid_av *other;
	struct mr_key of;

	open_side(&host, 0, SIZE_MAX);
	expect("max_ep_auth_key",
	       ((struct domain_attr *) host.info->domain_attr)->max_ep_auth_key, 4);
	open_side(&one, 1, 32);
	open_side(&two, 2, 32);
	for (int i = 0; i < 2; i++) {
		memset(key, 1 + i, 32);
		must("insert", late(host.av)->insert_auth_key(host.av, key, 32, &keys[i], 0));
	}
	expect("a short key", late(host.av)->insert_auth_key(host.av, key, 3, &there, 0), -FI_EINVAL);
	expect("a flag", late(host.av)->insert_auth_key(host.av, key, 32, &there, 1), -FI_EBADFLAGS);
	must("again", late(host.av)->insert_auth_key(host.av, key, 32, &there, 0));
	expect("the same key is the same handle", there, keys[1]);
	/* A key is of each vector that it was added to, and of the last of them until it goes. */
	must("fi_av_open", fi_av_open(host.domain, &as, &other, NULL));
	expect("another vector's key", fi_av_remove(other, keys, 1, KEY_FLAG), -FI_EINVAL);
	memset(key, 1, 32);
	must("in two", late(other)->insert_auth_key(other, key, 32, &there, 0));
	expect("the handle in two vectors", there, keys[0]);
	must("fi_av_remove", fi_av_remove(other, keys, 1, KEY_FLAG));
	memset(key, 3, 32);
	must("insert", late(other)->insert_auth_key(other, key, 32, &keys[2], 0));
	must("close", fi_close(&other->fid));
	expect("the key of a vector that was closed",
	       late(host.av)->lookup_auth_key(host.av, keys[2], back, &len), -FI_EINVAL);
	len = sizeof back;
	memset(key, 2, 32);
	expect("a key without FI_AV_AUTH_KEY",
	       late(one.av)->insert_auth_key(one.av, key, 32, &there, 0), -FI_EOPNOTSUPP);
	must("lookup", late(host.av)->lookup_auth_key(host.av, keys[1], back, &len));
	expect("the key of a handle", len == 32 && !memcmp(back, key, 32), 1);
	len = 4;
	must("lookup", late(host.av)->lookup_auth_key(host.av, keys[0], back, &len));
	expect("the length that it lacks", len, 32);

	to_one = keys[0], to_two = keys[1];
	expect("no key", fi_av_insert(host.av, one.name, 1, &there, 0, NULL), -FI_EINVAL);
	expect("no key by name", fi_av_insertsvc(host.av, "02:00:00:00:00:09", "1", &there, 0, NULL),
	       -FI_EINVAL);
	expect("no key of several",
	       fi_av_insertsym(host.av, "02:00:00:00:00:09", 1, "1", 1, &there, 0, NULL), -FI_EINVAL);
	must("insert", fi_av_insert(host.av, one.name, 1, &to_one, KEY_FLAG, NULL) - 1);
	must("insert", fi_av_insert(host.av, two.name, 1, &to_two, KEY_FLAG, NULL) - 1);
	len = sizeof back;
	must("lookup", late(host.av)->lookup_auth_key(host.av, to_two, back, &len));
	expect("the key of an address", len == 32 && !memcmp(back, key, 32), 1);
	must("insert", fi_av_insert(one.av, host.name, 1, &at_one, 0, NULL) - 1);
	must("insert", fi_av_insert(two.av, host.name, 1, &at_two, 0, NULL) - 1);
	expect("FI_AUTH_KEY without FI_AV_AUTH_KEY",
	       fi_av_insert(one.av, host.name, 1, &there, KEY_FLAG, NULL), -FI_EINVAL);

	/* The receive of the first tenant is posted first, and the second's message comes first. */
	must("fi_recvmsg", recv_of(&host, in[0], keys[0], in[0], KEY_FLAG));
	must("fi_recvmsg", recv_of(&host, in[1], keys[1], in[1], KEY_FLAG));
	expect("a receive of no key", recv_of(&host, in[2], to_one, NULL, KEY_FLAG), -FI_EINVAL);
	expect("a receive of none", recv_of(&host, in[2], FI_ADDR_UNSPEC, NULL, KEY_FLAG), -FI_EINVAL);
	expect("FI_AUTH_KEY without keys", recv_of(&one, in[2], 0, NULL, KEY_FLAG), -FI_EBADFLAGS);
	must("fi_send", fi_send(two.ep, "second", 7, NULL, at_two, NULL));
	come("the second tenant's message", &host, &two, in[1], to_two);
	must("fi_send", fi_send(one.ep, "first", 6, NULL, at_one, NULL));
	come("the first tenant's message", &host, &one, in[0], to_one);
	expect("whole", strcmp(in[0], "first") || strcmp(in[1], "second"), 0);
	must("fi_recv", fi_recv(two.ep, in[2], 8, NULL, FI_ADDR_UNSPEC, in[2]));
	must("fi_send", fi_send(host.ep, "answer", 7, NULL, to_two, NULL));
	come("an answer", &two, &host, in[2], at_two);

	/* A tenant whose address was inserted under the other's key is not reached. */
	there = keys[0];
	must("insert", fi_av_insert(host.av, two.name, 1, &there, KEY_FLAG, NULL) - 1);
	must("fi_send", fi_send(host.ep, "wrong", 6, NULL, there, NULL));
	expect("the other's key", outcome(&host, &two), 0); /* That of the answer. */
	expect("the other's key", outcome(&host, &two), FI_EACCES);

	of.av = host.av;
	of.src_addr = keys[0];
	expect("a region of all keys", region(&host, &of, sizeof of, 0), 0);
	expect("a region of one", region(&host, &of, sizeof of, KEY_FLAG), -FI_EOPNOTSUPP);
	expect("a region of no vector", region(&host, NULL, 0, 0), -FI_EINVAL);
	expect("an endpoint with a key of its own", endpoint(&host, 1, 32), -FI_EINVAL);
	expect("a key in use", fi_av_remove(host.av, keys, 1, KEY_FLAG), -FI_EBUSY);
	must("close", fi_close(&host.ep->fid));
	expect("addresses in use", fi_av_remove(host.av, keys, 1, KEY_FLAG), -FI_EBUSY);
	must("fi_av_remove", fi_av_remove(host.av, &to_one, 1, 0));
	must("fi_av_remove", fi_av_remove(host.av, &there, 1, 0));
	must("fi_av_remove", fi_av_remove(host.av, keys, 1, KEY_FLAG));
	len = sizeof back;
	expect("a key that is gone", late(host.av)->lookup_auth_key(host.av, keys[0], back, &len),
	       -FI_EINVAL);
	must("fi_endpoint", fi_endpoint(host.domain, host.info, &host.ep, NULL));
	close_side(&host);
	close_side(&one);
	close_side(&two);
}

int main(void)
{
	struct fi_info *info = NULL;

	same_key();
	several_keys();

	expect("a key of 15 bytes", ask(1, 15, &info), -FI_ENODATA);
	expect("a key of 1,025 bytes", ask(1, 1025, &info), -FI_ENODATA);
	meet("one key", (const unsigned char[]) { 1, 1 }, (const size_t[]) { 16, 16 }, 0);
	meet("two keys", (const unsigned char[]) { 1, 2 }, (const size_t[]) { 32, 32 }, FI_EACCES);
	meet("a key and none", (const unsigned char[]) { 1, 0 }, (const size_t[]) { 32, 0 }, FI_ENOKEY);
	meet("none and a key", (const unsigned char[]) { 0, 1 }, (const size_t[]) { 0, 32 }, FI_ENOKEY);
	printf("ok end\n");
	return bad != 0;
}
