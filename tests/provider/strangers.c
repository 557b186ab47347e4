/*
 * strangers CASE: who reaches an endpoint and a region over the provider. One line for each check:
 * "ok NAME" or "BAD NAME: got X, want Y".
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
	struct fid_ep *ep;
	unsigned char name[16];
};

static struct fi_info *info;
static struct fid_fabric *fabric;

static void open_side(struct side *s, struct fi_info *with)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	size_t len = sizeof s->name;

	must("fi_domain", fi_domain(fabric, with, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, with, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
	must("fi_getname", fi_getname(&s->ep->fid, s->name, &len));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
}

static fi_addr_t insert(struct side *s, const void *name)
{
	fi_addr_t at;

	must("fi_av_insert", fi_av_insert(s->av, name, 1, &at, 0, NULL) - 1);
	return at;
}

/* How the next operation of `s` ends: 0, or its error. */
static int outcome(struct side *s, struct side *other)
{
	struct fi_cq_tagged_entry entry;

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

/* What a message, a read and a write of `a` to `to` bring. */
static void reach(struct side *a, struct side *b, fi_addr_t to, uint64_t key, const int want[3])
{
	struct iovec iov = { a->name, 8 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = to };
	uint64_t word = 77;

	must("fi_sendmsg", fi_sendmsg(a->ep, &msg, FI_DELIVERY_COMPLETE));
	expect("fi_sendmsg", outcome(a, b), want[0]);
	must("fi_write", fi_write(a->ep, &word, 8, NULL, to, 0, key, NULL));
	expect("fi_write", outcome(a, b), want[1]);
	must("fi_read", fi_read(a->ep, &word, 8, NULL, to, 0, key, NULL));
	expect("fi_read", outcome(a, b), want[2]);
}

/* Who knows a MAC and a key of the program's choice, and not the incarnation. */
static void mac_alone(void)
{
	static const int lost[3] = { FI_ECONNRESET, FI_ECONNRESET, FI_ECONNRESET };
	static const int good[3] = { 0, 0, 0 };
	struct side a, b;
	unsigned char known[16], guess[16];
	uint64_t memory = 5;
	struct fid_mr *mr;

	open_side(&a, info);
	open_side(&b, info);
	must("fi_mr_reg", fi_mr_reg(b.domain, &memory, 8, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0,
				    &mr, NULL));
	memcpy(known, b.name, 16);
	memcpy(guess, b.name, 16);
	memset(guess + 8, 0, 8);
	reach(&a, &b, insert(&a, guess), 0, lost);
	expect("nothing was written", (long) memory, 5);
	reach(&a, &b, insert(&a, known), 0, good);
	expect("who was told the address writes", (long) memory, 77);
	must("close", fi_close(&mr->fid));
	close_side(&a);
	close_side(&b);
}

/* A server that is known by a number, which its clients learn of by their first message. */
static void by_number(struct fi_info *hints)
{
	struct fi_info *server = NULL, *client = NULL;
	struct side a, b;
	char in[8];

	must("fi_getinfo", fi_getinfo(fi_version(), NULL, "4711", FI_SOURCE, hints, &server));
	must("fi_getinfo", fi_getinfo(fi_version(), "127.0.0.1", "4711", 0, hints, &client));
	open_side(&b, server);
	open_side(&a, client);
	must("fi_recv", fi_recv(b.ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_send", fi_send(a.ep, "hello", 6, NULL, insert(&a, client->dest_addr), NULL));
	expect("a client reaches a server by its number", outcome(&a, &b), 0);
	expect("which receives", outcome(&b, &a), 0);
	must("fi_recv", fi_recv(a.ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_send", fi_send(b.ep, "hello", 6, NULL, insert(&b, a.name), NULL));
	expect("and answers", outcome(&b, &a), 0);
	expect("which is received", outcome(&a, &b), 0);
	close_side(&a);
	close_side(&b);
	fi_freeinfo(server);
	fi_freeinfo(client);
}

/* Keys of the provider's own: not the one asked for, and not one near another. */
static void keys(struct fi_info *hints)
{
	static uint64_t memory[64], all[64];
	static const int refused[3] = { 0, FI_EKEYREJECTED, FI_EKEYREJECTED };
	struct fid_mr *mr[64];
	struct fi_info *own = NULL;
	struct side a, b;
	fi_addr_t to;
	uint64_t high = 0, low = 0;

	hints->domain_attr->mr_mode = FI_MR_PROV_KEY | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &own));
	expect("mr_mode", own->domain_attr->mr_mode, FI_MR_PROV_KEY);
	open_side(&a, own);
	open_side(&b, own);
	for (int i = 0; i < 64; i++) {
		must("fi_mr_reg", fi_mr_reg(b.domain, memory + i, 8,
					    FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, mr + i,
					    NULL));
		all[i] = fi_mr_key(mr[i]);
		high |= all[i] ^ all[0];
		low |= (all[i] ^ all[0]) & 0xfffff;
	}
	/* Of 64 random numbers a bit is the same in all with a chance of 2^-63. */
	expect("bits that differ", __builtin_popcountll(high), 64);
	expect("of the lower twenty", __builtin_popcountll(low), 20);
	to = insert(&a, b.name);
	reach(&a, &b, to, all[63] ^ 1, refused);
	reach(&a, &b, to, all[63] ^ 1ULL << 40, refused);
	reach(&a, &b, to, all[63], (const int[3]) { 0, 0, 0 });
	expect("the right one is written", (long) memory[63], 77);
	for (int i = 0; i < 64; i++)
		must("close", fi_close(&mr[i]->fid));
	close_side(&a);
	close_side(&b);
	fi_freeinfo(own);
	hints->domain_attr->mr_mode = 0;
}

/* FI_BAREWIRE_PEERS=inserted. */
static void inserted(void)
{
	static const int refused[3] = { FI_ECONNREFUSED, FI_EACCES, FI_EACCES };
	struct side a, b;
	uint64_t memory = 5;
	struct fid_mr *mr;
	fi_addr_t to, from;

	open_side(&a, info);
	open_side(&b, info);
	must("fi_mr_reg", fi_mr_reg(b.domain, &memory, 8, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 7, 0,
				    &mr, NULL));
	to = insert(&a, b.name);
	reach(&a, &b, to, 7, refused);
	reach(&a, &b, to, 7, refused);
	expect("nothing was written", (long) memory, 5);
	from = insert(&b, a.name);
	reach(&a, &b, to, 7, (const int[3]) { 0, 0, 0 });
	expect("a peer that was inserted writes", (long) memory, 77);
	must("fi_av_remove", fi_av_remove(b.av, &from, 1, 0));
	reach(&a, &b, to, 7, refused);
	must("close", fi_close(&mr->fid));
	close_side(&a);
	close_side(&b);
}

int main(int argc, char **argv)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	if (argc > 1) {
		inserted();
	} else {
		mac_alone();
		by_number(hints);
		keys(hints);
	}
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(hints);
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
