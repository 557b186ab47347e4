/*
 * Calls the provider as no program should, through the headers that are installed, and says what
 * came back. Two domains of one process talk over the segment. One line for each probe: "ok NAME"
 * or "BAD NAME: got X, want Y".
 */
#include <complex.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <rdma/providers/fi_prov.h>

#include "check.h"

#ifndef FI_TAGGED_DIRECTED_RECV
#define FI_TAGGED_DIRECTED_RECV (1ULL << 45)
#endif
#ifndef FI_EXACT_DIRECTED_RECV
#define FI_EXACT_DIRECTED_RECV (1ULL << 48)
#endif
#ifndef FI_TAGGED_MULTI_RECV
#define FI_TAGGED_MULTI_RECV (1ULL << 46)
#endif

struct side {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_cntr *cntr;
	struct fid_ep *ep;
	fi_addr_t peer, self;
};

static struct fi_info *info;

static struct fi_info *hints_for(uint64_t caps)
{
	struct fi_info *hints = fi_allocinfo();
	hints->caps = caps;
	hints->mode = FI_CONTEXT;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	return hints;
}

static struct fi_info *ask(uint64_t caps)
{
	struct fi_info *hints = hints_for(caps), *list = NULL;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	fi_freeinfo(hints);
	return list;
}

static void open_domain(struct side *s)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_UNSPEC };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cntr_attr cntr = { .wait_obj = FI_WAIT_UNSPEC };

	must("fi_fabric", fi_fabric(info->fabric_attr, &s->fabric, NULL));
	must("fi_domain", fi_domain(s->fabric, info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, s));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cntr_open", fi_cntr_open(s->domain, &cntr, &s->cntr, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, s));
}

static void enable(struct side *s)
{
	must("bind cq", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind av", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void know(struct side *s, struct side *other)
{
	*(s == other ? &s->self : &s->peer) = known(s->av, other->ep);
}

/* The next entry of `s`, successful (0) or not (its error), within 10 s. The other side, if there
 * is one, makes progress; what it completes meanwhile is lost. */
static int next(struct side *s, struct side *other, struct fi_cq_err_entry *e)
{
	struct fi_cq_tagged_entry entry, lost;
	double end = now() + 10;
	while (now() < end) {
		ssize_t n = fi_cq_read(s->cq, &entry, 1);
		memset(e, 0, sizeof *e);
		if (n == 1) {
			e->op_context = entry.op_context;
			e->flags = entry.flags;
			e->len = entry.len;
			e->data = entry.data;
			e->tag = entry.tag;
			return 0;
		}
		if (n == -FI_EAVAIL) {
			expect("fi_cq_readerr says 1", fi_cq_readerr(s->cq, e, 0), 1);
			return e->err;
		}
		if (other)
			fi_cq_read(other->cq, &lost, 0);
	}
	return -FI_ETIMEDOUT;
}

static char big[1 << 16];

static void before_enable(struct side *a)
{
	char c;
	expect("fi_send before fi_enable", fi_send(a->ep, &c, 1, NULL, 0, NULL), -FI_EOPBADSTATE);
	expect("fi_recv before fi_enable", fi_recv(a->ep, &c, 1, NULL, 0, NULL), -FI_EOPBADSTATE);
	expect("fi_tsend before fi_enable", fi_tsend(a->ep, &c, 1, NULL, 0, 0, NULL),
	       -FI_EOPBADSTATE);
	expect("fi_enable without a vector", fi_enable(a->ep), -FI_ENOAV);
	must("bind av", fi_ep_bind(a->ep, &a->av->fid, 0));
	expect("fi_enable without a queue", fi_enable(a->ep), -FI_ENOCQ);
	must("bind cq", fi_ep_bind(a->ep, &a->cq->fid, FI_TRANSMIT | FI_RECV));
	must("fi_enable", fi_enable(a->ep));
	expect("fi_enable twice", fi_enable(a->ep), -FI_EOPBADSTATE);
}

static void sends(struct side *a)
{
	size_t inject = info->tx_attr->inject_size;
	struct iovec iov[100], one = { big, inject + 1 };
	struct fi_msg msg = { .msg_iov = &one, .iov_count = 1, .addr = a->peer };
	fi_addr_t p = a->peer;

	for (int i = 0; i < 100; i++)
		iov[i] = (struct iovec) { big, 1 };
	expect("fi_inject of inject_size + 1", fi_inject(a->ep, big, inject + 1, p), -FI_EMSGSIZE);
	expect("fi_inject of inject_size + 20000", fi_inject(a->ep, big, inject + 20000, p),
	       -FI_EMSGSIZE);
	expect("fi_tinject of inject_size + 1", fi_tinject(a->ep, big, inject + 1, p, 1),
	       -FI_EMSGSIZE);
	expect("fi_sendmsg FI_INJECT oversize", fi_sendmsg(a->ep, &msg, FI_INJECT), -FI_EMSGSIZE);
	expect("fi_send above max_msg_size",
	       fi_send(a->ep, big, info->ep_attr->max_msg_size + 1, NULL, p, NULL), -FI_EMSGSIZE);
	expect("fi_send to index 77", fi_send(a->ep, big, 1, NULL, 77, NULL), -FI_EINVAL);
	expect("fi_send to FI_ADDR_UNSPEC", fi_send(a->ep, big, 1, NULL, FI_ADDR_UNSPEC, NULL),
	       -FI_EINVAL);
	expect("fi_sendv of 100 pieces", fi_sendv(a->ep, iov, NULL, 100, p, NULL), -FI_EINVAL);
	expect("fi_recvv of 100 pieces", fi_recvv(a->ep, iov, NULL, 100, p, NULL), -FI_EINVAL);
	one.iov_len = 1;
	expect("fi_sendmsg with flag 1 << 62", fi_sendmsg(a->ep, &msg, 1ULL << 62), -FI_EBADFLAGS);
	expect("fi_sendmsg FI_MULTICAST", fi_sendmsg(a->ep, &msg, FI_MULTICAST), -FI_EBADFLAGS);
	expect("fi_sendmsg NULL", fi_sendmsg(a->ep, NULL, 0), -FI_EINVAL);
}

static void messages(struct side *a, struct side *b)
{
	struct fi_cq_err_entry e;
	char in[64], out[64];
	int ctx;
	struct iovec iov = { out, 8 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = a->peer };

	memset(out, 7, sizeof out);
	must("fi_recv", fi_recv(b->ep, in, 16, NULL, FI_ADDR_UNSPEC, &ctx));
	must("fi_send", fi_send(a->ep, out, 64, NULL, a->peer, &ctx));
	expect("short receive", next(b, a, &e), FI_ETRUNC);
	expect("short receive: len", e.len, 16);
	expect("short receive: olen", e.olen, 48);
	expect("short receive: context", e.op_context == &ctx, 1);
	expect("short receive: the sender succeeds", next(a, b, &e), 0);
	expect("short receive: flags of the sender", e.flags, FI_SEND | FI_MSG);

	must("fi_recv", fi_recv(b->ep, NULL, 0, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_senddata", fi_senddata(a->ep, NULL, 0, NULL, ~0ULL, a->peer, NULL));
	expect("empty message", next(b, a, &e), 0);
	expect("empty message: flags", e.flags, FI_RECV | FI_MSG | FI_REMOTE_CQ_DATA);
	expect("empty message: data", e.data == ~0ULL, 1);
	expect("empty message: sent", next(a, b, &e), 0);

	must("fi_recv", fi_recv(b->ep, in, 64, NULL, FI_ADDR_UNSPEC, NULL));
	expect("fi_sendmsg FI_FENCE", fi_sendmsg(a->ep, &msg, FI_FENCE), 0);
	expect("fenced message", next(b, a, &e), 0);
	expect("fenced message: sent", next(a, b, &e), 0);

	/* An injected buffer is free at once. */
	must("fi_trecv", fi_trecv(b->ep, in, 64, NULL, FI_ADDR_UNSPEC, 0x55, 0, &ctx));
	must("fi_tinject", fi_tinject(a->ep, out, 64, a->peer, 0x55));
	memset(out, 0, sizeof out);
	expect("injected message", next(b, a, &e), 0);
	expect("injected message: bytes", in[0] == 7 && in[63] == 7, 1);
	expect("injected message: tag", e.tag, 0x55);

	must("fi_trecv", fi_trecv(b->ep, in, 64, NULL, FI_ADDR_UNSPEC, 0x66, 0, &ctx));
	expect("fi_cancel", fi_cancel(&b->ep->fid, &ctx), 0);
	expect("cancelled receive", next(b, a, &e), FI_ECANCELED);
	expect("cancelled receive: context", e.op_context == &ctx, 1);
}

static void peeks(struct side *a, struct side *b)
{
	struct fi_cq_err_entry e;
	struct fi_context ctx;
	char in[8];
	struct iovec iov = { in, sizeof in };
	struct fi_msg_tagged peek = { .addr = FI_ADDR_UNSPEC, .tag = 9, .context = &ctx };

	must("peek", fi_trecvmsg(b->ep, &peek, FI_PEEK));
	expect("peek without a match", next(b, a, &e), FI_ENOMSG);
	must("fi_tinject", fi_tinject(a->ep, "abc", 3, a->peer, 9));
	for (double end = now() + 10; now() < end;) {
		must("peek", fi_trecvmsg(b->ep, &peek, FI_PEEK | FI_CLAIM));
		if (next(b, a, &e) == 0)
			break;
	}
	expect("peek with a match: len", e.len, 3);
	peek.msg_iov = &iov;
	peek.iov_count = 1;
	must("claim", fi_trecvmsg(b->ep, &peek, FI_CLAIM));
	expect("claim", next(b, a, &e), 0);
	expect("claim: bytes", memcmp(in, "abc", 3), 0);
}

/* The initiator's error of a write, read or atomic, and that `target` did not change. */
static void refused(const char *name, struct side *a, struct side *b, ssize_t posted, int want,
		    const long *target)
{
	struct fi_cq_err_entry e;
	must(name, posted);
	expect(name, next(a, b, &e), want);
	for (int i = 0; i < 8; i++)
		if (target[i] != 5)
			expect("nothing was written", target[i], 5);
}

static void remote(struct side *a, struct side *b)
{
	static long memory[24];
	long *inside = memory + 8, local[24] = { 1 };
	struct fid_mr *mr, *ro, *twice;
	struct fi_cq_err_entry e;
	uint64_t all = FI_REMOTE_READ | FI_REMOTE_WRITE, key = 0x77, bad_key = 0x99;
	struct fi_rma_iov range = { 0, 64, bad_key };
	struct iovec iov = { local, 64 };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = a->peer,
				  .rma_iov = &range, .rma_iov_count = 1 };
	fi_addr_t p = a->peer;

	for (int i = 0; i < 24; i++)
		memory[i] = 5;
	must("fi_mr_reg", fi_mr_reg(b->domain, inside, 64, all, 0, key, 0, &mr, NULL));
	must("fi_mr_reg", fi_mr_reg(b->domain, inside, 64, FI_REMOTE_READ, 0, 0x78, 0, &ro, NULL));
	must("fi_mr_reg with FI_RMA_EVENT",
	     fi_mr_reg(b->domain, inside, 64, all, 0, 0x79, FI_RMA_EVENT, &twice, NULL));
	must("close", fi_close(&twice->fid));
	expect("fi_mr_reg of a key in use",
	       fi_mr_reg(b->domain, inside, 64, all, 0, key, 0, &twice, NULL), -FI_ENOKEY);
	expect("fi_mr_reg with flag 1 << 62",
	       fi_mr_reg(b->domain, inside, 64, all, 0, 0x79, 1ULL << 62, &twice, NULL),
	       -FI_EBADFLAGS);
	expect("the key is the requested one", fi_mr_key(mr), key);

	refused("write, wrong key", a, b, fi_write(a->ep, local, 64, NULL, p, 0, bad_key, NULL),
		FI_EKEYREJECTED, inside);
	refused("write, wrong key, FI_DELIVERY_COMPLETE", a, b,
		fi_writemsg(a->ep, &msg, FI_DELIVERY_COMPLETE), FI_EKEYREJECTED, inside);
	refused("write past the end", a, b, fi_write(a->ep, local, 72, NULL, p, 0, key, NULL),
		FI_EACCES, inside);
	refused("write behind the end", a, b, fi_write(a->ep, local, 8, NULL, p, 64, key, NULL),
		FI_EACCES, inside);
	refused("write before the start", a, b,
		fi_write(a->ep, local, 8, NULL, p, (uint64_t) -8, key, NULL), FI_EACCES, inside);
	refused("write to a read-only region", a, b,
		fi_write(a->ep, local, 8, NULL, p, 0, 0x78, NULL), FI_EACCES, inside);
	refused("read, wrong key", a, b, fi_read(a->ep, local, 8, NULL, p, 0, bad_key, NULL),
		FI_EKEYREJECTED, inside);
	refused("atomic, wrong key", a, b,
		fi_atomic(a->ep, local, 1, NULL, p, 0, bad_key, FI_UINT64, FI_SUM, NULL),
		FI_EKEYREJECTED, inside);
	refused("atomic past the end", a, b,
		fi_atomic(a->ep, local, 9, NULL, p, 0, key, FI_UINT64, FI_SUM, NULL), FI_EACCES,
		inside);
	expect("nothing below the region", memory[7], 5);
	expect("nothing above the region", memory[16], 5);

	must("fi_write", fi_write(a->ep, local, 8, NULL, p, 8, key, NULL));
	expect("a good write", next(a, b, &e), 0);
	expect("a good write: flags", e.flags, FI_RMA | FI_WRITE);
	expect("a good write: bytes", inside[1], 1);
	/* With the head of a packet its length would wrap. */
	for (size_t len = SIZE_MAX - 80; len != 0; len++)
		if (fi_write(a->ep, big, len, NULL, p, 0, key, NULL) != -FI_EMSGSIZE
		    || fi_read(a->ep, big, len, NULL, p, 0, key, NULL) != -FI_EMSGSIZE)
			expect("fi_write and fi_read of too much", (long) len, 0);
	local[0] = 10;
	must("fi_fetch_atomic", fi_fetch_atomic(a->ep, local, 1, NULL, local + 1, NULL, p, 8, key,
						FI_UINT64, FI_SUM, NULL));
	expect("a good fetch", next(a, b, &e), 0);
	expect("a good fetch: flags", e.flags, FI_ATOMIC | FI_READ);
	expect("a good fetch: old value", local[1], 1);
	expect("a good fetch: new value", inside[1], 11);
	must("fi_fetch_atomic", fi_fetch_atomic(a->ep, NULL, 1, NULL, local + 2, NULL, p, 8, key,
						FI_UINT64, FI_ATOMIC_READ, NULL));
	expect("an atomic read without an operand", next(a, b, &e), 0);
	expect("an atomic read without an operand: value", local[2], 11);
	must("close", fi_close(&mr->fid));
	must("close", fi_close(&ro->fid));
	expect("close a region twice", fi_close(&mr->fid), -FI_EBADF);
}

static void atomics(struct side *a)
{
	static char operand[1 << 16], result[1 << 16];
	fi_addr_t p = a->peer;
	struct fi_atomic_attr attr;
	size_t count = 0;

	expect("fi_atomicvalid", fi_atomicvalid(a->ep, FI_UINT64, FI_SUM, &count), 0);
	expect("fi_query_atomic", fi_query_atomic(a->domain, FI_UINT64, FI_SUM, &attr, 0), 0);
	expect("both say the same", attr.count, count);
	expect("size of a double complex",
	       fi_query_atomic(a->domain, FI_DOUBLE_COMPLEX, FI_SUM, &attr, 0) ? 0 : attr.size,
	       sizeof(double complex));
	/* libfabric 2.0's FI_BFLOAT16 is 17 and its FI_DIFF 19; older headers lack them. */
	expect("fi_query_atomic of FI_BFLOAT16",
	       fi_query_atomic(a->domain, 17, FI_SUM, &attr, 0) ? 0 : attr.size, 2);
	expect("fi_atomicvalid of FI_DIFF", fi_atomicvalid(a->ep, FI_UINT64, 19, &count), 0);
	expect("fi_atomicvalid of FI_DIFF on FI_FLOAT8_E5M2", fi_atomicvalid(a->ep, 19, 19, &count), 0);
	expect("fi_atomicvalid of datatype 20", fi_atomicvalid(a->ep, 20, FI_SUM, &count),
	       -FI_EOPNOTSUPP);
	expect("fi_query_atomic with both flags",
	       fi_query_atomic(a->domain, FI_UINT64, FI_SUM, &attr,
			       FI_FETCH_ATOMIC | FI_COMPARE_ATOMIC), -FI_EBADFLAGS);
	expect("fi_query_atomic with flag 1 << 62",
	       fi_query_atomic(a->domain, FI_UINT64, FI_SUM, &attr, 1ULL << 62), -FI_EBADFLAGS);
#define ATOMIC(n, type, op) fi_atomic(a->ep, operand, n, NULL, p, 0, 1, type, op, NULL)
	expect("atomic above the limit", ATOMIC(count + 1, FI_UINT64, FI_SUM), -FI_EMSGSIZE);
	expect("atomic of nothing", ATOMIC(0, FI_UINT64, FI_SUM), -FI_EINVAL);
	expect("fi_atomic FI_ATOMIC_READ", ATOMIC(1, FI_UINT64, FI_ATOMIC_READ), -FI_EOPNOTSUPP);
	expect("fi_atomic MIN of complex", ATOMIC(1, FI_FLOAT_COMPLEX, FI_MIN), -FI_EOPNOTSUPP);
	expect("fi_atomic BOR of float", ATOMIC(1, FI_FLOAT, FI_BOR), -FI_EOPNOTSUPP);
	expect("fi_atomic of datatype 99", ATOMIC(1, 99, FI_SUM), -FI_EOPNOTSUPP);
	expect("fi_atomic of operation 99", ATOMIC(1, FI_UINT64, 99), -FI_EOPNOTSUPP);
	expect("fi_atomicvalid of datatype 99", fi_atomicvalid(a->ep, 99, FI_SUM, &count),
	       -FI_EOPNOTSUPP);
	expect("fi_fetch_atomic FI_CSWAP",
	       fi_fetch_atomic(a->ep, operand, 1, NULL, result, NULL, p, 0, 1, FI_UINT64, FI_CSWAP,
			       NULL), -FI_EOPNOTSUPP);
	expect("fi_compare_atomic FI_SUM",
	       fi_compare_atomic(a->ep, operand, 1, NULL, operand, NULL, result, NULL, p, 0, 1,
				 FI_UINT64, FI_SUM, NULL), -FI_EOPNOTSUPP);
	expect("fi_inject_atomic above inject_size",
	       fi_inject_atomic(a->ep, operand, info->tx_attr->inject_size / 8 + 1, p, 0, 1,
				FI_UINT64, FI_SUM), -FI_EMSGSIZE);
}

/* MPI registers all memory there is for a window that memory is attached to later. */
static void everything(struct side *a, struct side *b)
{
	static uint64_t there = 1, old;
	uint64_t all = FI_REMOTE_READ | FI_REMOTE_WRITE, here = 7;
	uint64_t at = (uint64_t) (uintptr_t) &there;
	struct fi_cq_err_entry e;
	struct fid_mr *mr;
	double start = now();

	must("fi_mr_reg of everything", fi_mr_reg(b->domain, NULL, UINTPTR_MAX, all, 0, 0x99, 0, &mr,
						  NULL));
	expect("it takes no time", now() - start < 20, 1);
	must("fi_write", fi_write(a->ep, &here, 8, NULL, a->peer, at, 0x99, NULL));
	expect("written somewhere", next(a, b, &e) == 0 && there == 7, 1);
	must("fi_fetch_atomic", fi_fetch_atomic(a->ep, &here, 1, NULL, &old, NULL, a->peer, at, 0x99,
						FI_UINT64, FI_SUM, NULL));
	expect("added somewhere", next(a, b, &e) == 0 && there == 14 && old == 7, 1);
	must("close", fi_close(&mr->fid));
}

/* fi_setname, and what is shared or waited for in ways that are not there. */
static void names(struct side *a)
{
	char name[64], named[64];
	size_t len = sizeof name;
	struct fid_ep *ep;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fi_av_attr shared = { .name = "probe", .flags = FI_READ };
	struct fi_cq_attr mutex = { .wait_obj = FI_WAIT_MUTEX_COND };
	must("fi_getname", fi_getname(&a->ep->fid, name, &len));
	expect("fi_setname when enabled", fi_setname(&a->ep->fid, name, len), -FI_EOPBADSTATE);
	must("fi_endpoint", fi_endpoint(a->domain, info, &ep, NULL));
	expect("fi_setname of another's", fi_setname(&ep->fid, name, len), -FI_EADDRINUSE);
	expect("fi_setname, too short", fi_setname(&ep->fid, name, len - 1), -FI_EINVAL);
	expect("fi_setname of nothing", fi_setname(&ep->fid, NULL, len), -FI_EINVAL);
	/* The number, in a native address. */
	name[6] = 77;
	expect("fi_setname", fi_setname(&ep->fid, name, len), 0);
	must("fi_getname", fi_getname(&ep->fid, named, &len));
	expect("fi_getname tells it", memcmp(name, named, len), 0);
	name[5] ^= 1;
	expect("fi_setname of another port's", fi_setname(&ep->fid, name, len), -FI_EADDRNOTAVAIL);
	must("close", fi_close(&ep->fid));
	expect("a shared vector to read", fi_av_open(a->domain, &shared, &av, NULL), -FI_ENOSYS);
	shared.flags = 0;
	expect("a shared vector", fi_av_open(a->domain, &shared, &av, NULL), -FI_ENOSYS);
	expect("FI_WAIT_MUTEX_COND", fi_cq_open(a->domain, &mutex, &cq, NULL), -FI_ENOSYS);
}

static void objects(struct side *a)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry err = { 0 };
	char name[64];
	size_t len = 0, size = 1;
	fi_addr_t unset = 12345;
	double start = now();
	struct fid_ep *ep;
	struct fid_pep *pep;
	struct fid_stx *stx;

	expect("fi_cq_read of an empty queue", fi_cq_read(a->cq, &entry, 1), -FI_EAGAIN);
	expect("fi_cq_readerr of an empty queue", fi_cq_readerr(a->cq, &err, 0), -FI_EAGAIN);
	expect("fi_cq_sread in vain", fi_cq_sread(a->cq, &entry, 1, NULL, 50), -FI_EAGAIN);
	expect("fi_cq_sread took its time", now() - start >= 0.05, 1);
	must("fi_cq_signal", fi_cq_signal(a->cq));
	start = now();
	expect("fi_cq_sread signalled", fi_cq_sread(a->cq, &entry, 1, NULL, 5000), -FI_EAGAIN);
	expect("fi_cq_sread came back at once", now() - start < 4, 1);
	expect("fi_cntr_wait in vain", fi_cntr_wait(a->cntr, 1, 20), -FI_ETIMEDOUT);
	must("fi_cntr_adderr", fi_cntr_adderr(a->cntr, 1));
	expect("fi_cntr_wait with an error", fi_cntr_wait(a->cntr, 1, 1000), -FI_EAVAIL);
	must("fi_cntr_add", fi_cntr_add(a->cntr, 3));
	expect("fi_cntr_read", fi_cntr_read(a->cntr), 3);
	expect("fi_cntr_readerr", fi_cntr_readerr(a->cntr), 1);
	expect("fi_getname, no room", fi_getname(&a->ep->fid, NULL, &len), -FI_ETOOSMALL);
	expect("fi_getname says how much", len > 0 && len <= sizeof name, 1);
	names(a);
	expect("fi_av_lookup of an unset index", fi_av_lookup(a->av, 77, name, &len), -FI_EINVAL);
	expect("fi_av_remove of an unset index", fi_av_remove(a->av, &unset, 1, 0), -FI_EINVAL);
	expect("fi_setopt of an unknown option",
	       fi_setopt(&a->ep->fid, FI_OPT_ENDPOINT, 4711, &size, sizeof size), -FI_ENOPROTOOPT);
	expect("fi_setopt FI_OPT_MIN_MULTI_RECV",
	       fi_setopt(&a->ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &size, sizeof size),
	       0);
	expect("fi_shutdown", fi_shutdown(a->ep, 0), -FI_ENOSYS);
	expect("fi_connect", fi_connect(a->ep, name, NULL, 0), -FI_ENOSYS);
	expect("fi_barrier", fi_barrier(a->ep, 0, NULL), -FI_EINVAL);
	expect("fi_scalable_ep", fi_scalable_ep(a->domain, info, &ep, NULL), 0);
	must("close", fi_close(&ep->fid));
	expect("fi_stx_context", fi_stx_context(a->domain, info->tx_attr, &stx, NULL), 0);
	must("close", fi_close(&stx->fid));
	expect("fi_passive_ep", fi_passive_ep(a->fabric, info, &pep, NULL), -FI_EINVAL);
	expect("close a domain in use", fi_close(&a->domain->fid), -FI_EBUSY);
	expect("close a queue in use", fi_close(&a->cq->fid), -FI_EBUSY);
	expect("close a vector in use", fi_close(&a->av->fid), -FI_EBUSY);
	expect("close a fabric in use", fi_close(&a->fabric->fid), -FI_EBUSY);
}

/* What an answer was not given with, no endpoint is opened with. */
static void default_flags(struct side *a)
{
	struct fi_info *wrong = fi_dupinfo(info);
	struct fid_ep *ep;
	wrong->tx_attr->op_flags = FI_PEEK;
	expect("FI_PEEK of sends", fi_endpoint(a->domain, wrong, &ep, NULL), -FI_EBADFLAGS);
	wrong->tx_attr->op_flags = 1ULL << 62;
	expect("flag 1 << 62 of sends", fi_endpoint(a->domain, wrong, &ep, NULL), -FI_EBADFLAGS);
	wrong->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
	wrong->rx_attr->op_flags = FI_INJECT;
	expect("FI_INJECT of receives", fi_endpoint(a->domain, wrong, &ep, NULL), -FI_EBADFLAGS);
	wrong->rx_attr->op_flags = FI_COMPLETION;
	must("fi_endpoint", fi_endpoint(a->domain, wrong, &ep, NULL));
	must("close", fi_close(&ep->fid));
	fi_freeinfo(wrong);
}

/* As many receives and sends as the answer says have room in a queue of no particular size. */
static void all_posted(struct side *a, struct side *b)
{
	struct side s = { .domain = a->domain };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	size_t posted = 0, sent = 0;

	for (int size = 0; size < 2; size++) {
		cq.size = (size_t) size;
		must("fi_cq_open", fi_cq_open(s.domain, &cq, &s.cq, NULL));
		must("fi_av_open", fi_av_open(s.domain, &av, &s.av, NULL));
		must("fi_endpoint", fi_endpoint(s.domain, info, &s.ep, NULL));
		enable(&s);
		know(&s, b);
		for (posted = 0; posted < info->rx_attr->size; posted++)
			if (fi_recv(s.ep, big, 8, NULL, FI_ADDR_UNSPEC, NULL))
				break;
		expect("all receives", (long) posted, (long) info->rx_attr->size);
		for (sent = 0; sent < info->tx_attr->size; sent++)
			if (fi_tsend(s.ep, big, 8, NULL, s.peer, 77, NULL))
				break;
		expect("all sends", (long) sent, (long) info->tx_attr->size);
		for (double end = now() + 10; sent > 0 && now() < end;) {
			sent -= fi_cq_read(s.cq, &entry, 1) == 1;
			fi_cq_read(b->cq, &entry, 0);
		}
		expect("all were sent", (long) sent, 0);
		must("close", fi_close(&s.ep->fid));
		must("close", fi_close(&s.cq->fid));
		must("close", fi_close(&s.av->fid));
	}
}

static void infos(void)
{
	struct fi_info *hints = hints_for(FI_MSG), *list = NULL;
	uint32_t newer = FI_VERSION(FI_MAJOR(fi_version()) + 1, 0);

	expect("fi_getinfo of a newer interface", fi_getinfo(newer, NULL, NULL, 0, hints, &list),
	       -FI_ENOSYS);
	expect("fi_getinfo of an unknown node",
	       fi_getinfo(fi_version(), "192.0.2.1", "7", 0, hints, &list), -FI_ENODATA);
	hints->ep_attr->type = FI_EP_RDM + 1;
	expect("fi_getinfo of an unknown type", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list),
	       -FI_ENODATA);
	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = FI_TAGGED | FI_MULTICAST;
	expect("fi_getinfo of FI_MULTICAST without FI_MSG",
	       fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list), -FI_ENODATA);
	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_DGRAM;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	expect("a datagram's longest", (long) list->ep_attr->max_msg_size, 65536);
	fi_freeinfo(list);
	list = NULL;
	hints->ep_attr->max_msg_size = 65537;
	expect("fi_getinfo of a longer datagram",
	       fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list), -FI_ENODATA);
	hints->ep_attr->max_msg_size = 0;
	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = FI_MSG | FI_HMEM;
	expect("fi_getinfo of FI_HMEM", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list),
	       -FI_ENODATA);
	hints->caps = FI_MSG;
	hints->mode = FI_MSG_PREFIX;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	expect("room before a message is offered, and not used",
	       list->mode == FI_MSG_PREFIX && list->ep_attr->msg_prefix_size == 0, 1);
	fi_freeinfo(list);
	list = NULL;
	hints->mode = 0;
	hints->src_addr = calloc(1, 28);
	hints->src_addrlen = 28;
	expect("fi_getinfo with the address of another family",
	       fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list), -FI_ENODATA);
	expect("fi_getinfo with FI_SOURCE and a name does not look at src_addr",
	       fi_getinfo(fi_version(), NULL, "7471", FI_SOURCE, hints, &list), 0);
	fi_freeinfo(list);
	list = NULL;
	hints->dest_addr = hints->src_addr;
	hints->dest_addrlen = 28;
	hints->src_addr = NULL;
	hints->src_addrlen = 0;
	expect("fi_getinfo to the address of another family",
	       fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list), -FI_ENODATA);
	expect("fi_getinfo with FI_SOURCE and a name looks at dest_addr",
	       fi_getinfo(fi_version(), NULL, "7471", FI_SOURCE, hints, &list), -FI_ENODATA);
	expect("fi_getinfo with a name does not look at dest_addr",
	       fi_getinfo(fi_version(), "127.0.0.1", "7471", 0, hints, &list), 0);
	expect("and returns the address that the name has", list && list->dest_addrlen == 16, 1);
	fi_freeinfo(list);
	list = NULL;
	free(hints->dest_addr);
	hints->dest_addr = NULL;
	hints->dest_addrlen = 0;
	must("fi_getinfo of an address in text",
	     fi_getinfo(fi_version(), "fi_sockaddr_in://127.0.0.1:7471", NULL, 0, hints, &list));
	expect("which is one", list->dest_addrlen, 16);
	fi_freeinfo(list);
	list = NULL;
	expect("fi_getinfo of that and a service",
	       fi_getinfo(fi_version(), "fi_sockaddr_in://127.0.0.1:7471", "7", 0, hints, &list),
	       -FI_ENODATA);
	for (unsigned bit = 0; bit < 64; bit++) {
		hints->caps = 1ULL << bit;
		list = NULL;
		if (fi_getinfo(FI_VERSION(1, 5), NULL, NULL, 0, hints, &list) == 0) {
			if (!(list->caps & hints->caps))
				expect("an answer has what was asked for", bit, -1);
			fi_freeinfo(list);
		}
	}
	hints->caps = FI_TAGGED;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->domain_attr->data_progress = FI_PROGRESS_AUTO;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
	hints->addr_format = FI_SOCKADDR_IN;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	expect("caps of FI_TAGGED", list->caps & (FI_MSG | FI_RMA | FI_ATOMIC | FI_SOURCE), 0);
	expect("threading comes back", list->domain_attr->threading, FI_THREAD_DOMAIN);
	expect("progress comes back", list->domain_attr->data_progress, FI_PROGRESS_AUTO);
	expect("mr_mode: keys that cannot be guessed, and nothing else is needed",
	       list->domain_attr->mr_mode, FI_MR_PROV_KEY);
	expect("the address format comes back", list->addr_format, FI_SOCKADDR_IN);
	expect("receive bits of the transmit side", list->tx_attr->caps & (FI_RECV | FI_MULTI_RECV),
	       0);
	expect("transmit bits of the receive side", list->rx_attr->caps & (FI_SEND | FI_FENCE), 0);
	fi_freeinfo(list);
	hints->caps = FI_RMA | FI_ATOMIC;
	hints->tx_attr->msg_order = FI_ORDER_RAW | FI_ORDER_WAW | FI_ORDER_ATOMIC_WAR;
	hints->rx_attr->msg_order = hints->tx_attr->msg_order;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	expect("orders that are granted hold for every length: RAW",
	       list->tx_attr->msg_order & FI_ORDER_RAW &&
		       list->ep_attr->max_order_raw_size == list->ep_attr->max_msg_size, 1);
	expect("WAW", list->tx_attr->msg_order & FI_ORDER_WAW &&
			      list->ep_attr->max_order_waw_size == list->ep_attr->max_msg_size, 1);
	expect("WAR, of atomics alone",
	       list->tx_attr->msg_order & FI_ORDER_ATOMIC_WAR &&
		       !(list->tx_attr->msg_order & (FI_ORDER_WAR | FI_ORDER_RMA_WAR)) &&
		       list->ep_attr->max_order_war_size == list->ep_attr->max_msg_size, 1);
	fi_freeinfo(list);
	hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
	expect("an order that is not asked for has no length",
	       list->ep_attr->max_order_raw_size | list->ep_attr->max_order_war_size |
		       list->ep_attr->max_order_waw_size, 0);
	hints->tx_attr->msg_order = hints->rx_attr->msg_order = 0;
	hints->caps = FI_TAGGED;
	for (int level = FI_THREAD_SAFE; level <= FI_THREAD_ENDPOINT; level++) {
		fi_freeinfo(list);
		hints->domain_attr->threading = level;
		must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &list));
		expect("each level of threading comes back", list->domain_attr->threading, level);
	}
	expect("there is a device", list->nic && list->nic->link_attr && list->nic->bus_attr, 1);
	fi_freeinfo(list);
	fi_freeinfo(hints);
}

static void without_tagged(void)
{
	struct side s = { 0 };
	struct fi_info *all = info;
	char c = 0;

	info = ask(FI_MSG);
	open_domain(&s);
	enable(&s);
	know(&s, &s);
	expect("fi_tsend without FI_TAGGED", fi_tsend(s.ep, &c, 1, NULL, s.self, 0, NULL),
	       -FI_EOPNOTSUPP);
	expect("fi_write without FI_RMA", fi_write(s.ep, &c, 1, NULL, s.self, 0, 0, NULL),
	       -FI_EOPNOTSUPP);
	must("close", fi_close(&s.ep->fid));
	expect("close an endpoint twice", fi_close(&s.ep->fid), -FI_EBADF);
	must("close", fi_close(&s.cntr->fid));
	must("close", fi_close(&s.cq->fid));
	must("close", fi_close(&s.av->fid));
	must("close", fi_close(&s.domain->fid));
	expect("close a domain twice", fi_close(&s.domain->fid), -FI_EBADF);
	must("close", fi_close(&s.fabric->fid));
	fi_freeinfo(info);
	info = all;
}

static void formats(struct side *a, struct side *b)
{
	static const size_t sizes[] = { sizeof(struct fi_cq_entry), sizeof(struct fi_cq_entry),
		sizeof(struct fi_cq_msg_entry), sizeof(struct fi_cq_data_entry),
		sizeof(struct fi_cq_tagged_entry) };

	for (int format = 1; format <= 4; format++) {
		struct fi_cq_attr attr = { .format = format };
		struct fi_cq_tagged_entry e[21];
		struct side s = *b;
		fi_addr_t to;
		char name[64], in[8], text[40];
		size_t len = sizeof name;
		int got = 0;

		must("fi_cq_open", fi_cq_open(b->domain, &attr, &s.cq, NULL));
		must("fi_endpoint", fi_endpoint(b->domain, info, &s.ep, NULL));
		enable(&s);
		must("fi_getname", fi_getname(&s.ep->fid, name, &len));
		must("fi_av_insert", fi_av_insert(a->av, name, 1, &to, 0, NULL) - 1);
		for (int i = 0; i < 20; i++)
			must("fi_trecv", fi_trecv(s.ep, in, 8, NULL, FI_ADDR_UNSPEC, 3, 0,
						  (void *) (uintptr_t) (i + 1)));
		for (int i = 0; i < 20; i++)
			must("fi_tinject", fi_tinject(a->ep, "12345", 5, to, 3));
		memset(e, 0xee, sizeof e);
		for (double end = now() + 10; got < 20 && now() < end;) {
			struct fi_cq_tagged_entry none;
			ssize_t n = fi_cq_read(s.cq, (char *) e + got * sizes[format], 20 - got);
			got += n > 0 ? (int) n : 0;
			fi_cq_read(a->cq, &none, 0);
		}
		snprintf(text, sizeof text, "format %d: entries", format);
		expect(text, got, 20);
		snprintf(text, sizeof text, "format %d: last context", format);
		expect(text, (long) *(void **) ((char *) e + 19 * sizes[format]), 20);
		snprintf(text, sizeof text, "format %d: nothing behind", format);
		expect(text, ((unsigned char *) e)[20 * sizes[format]], 0xee);
		if (format >= 2)
			expect("length", *(size_t *) ((char *) e + 19 * sizes[format] + 16), 5);
		must("close", fi_close(&s.ep->fid));
		must("close", fi_close(&s.cq->fid));
	}
}

/* Queues and counters of both sides in one set. */
static void polls(struct side *a, struct side *b)
{
	struct fi_poll_attr attr = { 0 };
	struct fid_poll *set;
	struct fid_cntr *cntr;
	struct fid_cq *cq;
	struct iovec iov = { "x", 1 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = b->peer };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e;
	void *context[4] = { NULL };
	char in[8];
	int n = 0;

	must("fi_poll_open", fi_poll_open(a->domain, &attr, &set));
	must("fi_poll_add", fi_poll_add(set, &a->cq->fid, 0));
	must("fi_poll_add", fi_poll_add(set, &a->cntr->fid, 0));
	expect("fi_poll_add of an endpoint", fi_poll_add(set, &a->ep->fid, 0), -FI_EINVAL);
	fi_poll(set, context, 4);
	expect("fi_poll of nothing", fi_poll(set, context, 4), 0);
	must("fi_cntr_add", fi_cntr_add(a->cntr, 1));
	expect("fi_poll of a counter", fi_poll(set, context, 4), 1);
	expect("fi_poll of a counter again", fi_poll(set, context, 4), 0);
	must("fi_recv", fi_recv(a->ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_send", fi_send(b->ep, "x", 1, NULL, b->peer, NULL));
	for (double end = now() + 10; n == 0 && now() < end;)
		n = fi_poll(set, context, 4);
	expect("fi_poll of a queue", n, 1);
	expect("fi_poll of a queue: context", context[0] == a, 1);
	expect("fi_poll takes nothing away", next(a, b, &e), 0);
	expect("fi_poll: sent", next(b, a, &e), 0);
	/* With no room for contexts the loop is turned, and nothing is taken for told. */
	must("fi_cntr_add", fi_cntr_add(a->cntr, 1));
	must("fi_recv", fi_recv(a->ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_sendmsg", fi_sendmsg(b->ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	n = -FI_EAGAIN;
	for (double end = now() + 10; n == -FI_EAGAIN && now() < end;) {
		fi_poll(set, NULL, 0);
		n = fi_cq_read(b->cq, &entry, 1);
	}
	expect("fi_poll without room makes progress", n, 1);
	expect("fi_poll without room tells nothing away", fi_poll(set, context, 4), 2);
	expect("fi_poll: received", next(a, b, &e), 0);
	must("fi_poll_del", fi_poll_del(set, &a->cq->fid, 0));
	must("fi_cntr_open", fi_cntr_open(a->domain, NULL, &cntr, NULL));
	must("fi_cq_open", fi_cq_open(a->domain, NULL, &cq, NULL));
	must("fi_poll_add", fi_poll_add(set, &cntr->fid, 0));
	must("fi_poll_add", fi_poll_add(set, &cq->fid, 0));
	expect("close a counter in a poll set", fi_close(&cntr->fid), -FI_EBUSY);
	expect("close a queue in a poll set", fi_close(&cq->fid), -FI_EBUSY);
	must("fi_poll_del", fi_poll_del(set, &cntr->fid, 0));
	must("fi_poll_del", fi_poll_del(set, &cq->fid, 0));
	must("close", fi_close(&cntr->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&set->fid));
}

static void forks(struct side *a, struct side *b)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e;
	char in[8];
	int status = -1;
	pid_t child = fork();

	if (child == 0) {
		int code = 0;
		if (fi_send(a->ep, in, 1, NULL, a->peer, NULL) != -FI_EOPBADSTATE)
			code |= 1;
		if (fi_cq_read(a->cq, &entry, 1) != -FI_EOPBADSTATE)
			code |= 2;
		if (fi_close(&a->ep->fid))
			code |= 4;
		_exit(code);
	}
	waitpid(child, &status, 0);
	expect("a forked child is told", status, 0);
	must("fi_recv", fi_recv(b->ep, in, 8, NULL, FI_ADDR_UNSPEC, NULL));
	must("fi_send", fi_send(a->ep, "x", 1, NULL, a->peer, NULL));
	expect("the parent goes on", next(b, a, &e), 0);
	expect("the parent goes on: sent", next(a, b, &e), 0);
}

static void done(struct side *s)
{
	struct fi_poll_attr attr = { 0 };
	struct fid_poll *set;
	struct fid_stx *stx;

	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cntr->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("fi_stx_context", fi_stx_context(s->domain, info->tx_attr, &stx, NULL));
	expect("close a domain with a context", fi_close(&s->domain->fid), -FI_EBUSY);
	must("close", fi_close(&stx->fid));
	must("fi_poll_open", fi_poll_open(s->domain, &attr, &set));
	expect("close a domain with a poll set", fi_close(&s->domain->fid), -FI_EBUSY);
	must("close", fi_close(&set->fid));
	must("close", fi_close(&s->domain->fid));
	must("close", fi_close(&s->fabric->fid));
}

/* The provider itself, which knows a later interface than the library may. */
static struct fi_provider *provider(void)
{
	const char *at = getenv("FI_PROVIDER_PATH");
	DIR *dir = opendir(at);
	struct fi_provider *(*entry)(void) = NULL;

	for (struct dirent *file; dir && !entry && (file = readdir(dir));) {
		char path[4096];
		void *lib;
		snprintf(path, sizeof path, "%s/%s", at, file->d_name);
		if (strstr(path, ".so") && (lib = dlopen(path, RTLD_NOW | RTLD_NOLOAD)))
			entry = (struct fi_provider *(*)(void)) dlsym(lib, "fi_prov_ini");
	}
	closedir(dir);
	must("the provider is loaded", entry ? 0 : -1);
	return entry();
}

/* The answer to a program of libfabric 2.0, or NULL. */
static struct fi_info *ask_2_0(uint64_t caps)
{
	struct fi_info *hints = hints_for(caps), *list = NULL;
	int ret = provider()->getinfo(FI_VERSION(2, 0), NULL, NULL, 0, hints, &list);
	if (ret)
		expect("fi_getinfo of 2.0", ret, -FI_ENODATA);
	else if (!list->fabric_attr->prov_name)
		list->fabric_attr->prov_name = strdup("barewire"); /* As the library does. */
	fi_freeinfo(hints);
	return list;
}

static ssize_t tagged_receive(struct side *s, size_t len, fi_addr_t from, uint64_t tag,
			      uint64_t ignore, uint64_t flags)
{
	struct iovec one = { big, len };
	struct fi_msg_tagged msg = { .msg_iov = &one, .iov_count = 1, .addr = from, .tag = tag,
				     .ignore = ignore, .context = s };
	return fi_trecvmsg(s->ep, &msg, flags);
}

/* Bits of 2.0: a program of an older interface is not told of them, and gets none. */
static void newer_bits(uint64_t caps, uint64_t own)
{
	struct fi_info *hints = hints_for(caps), *list = NULL;

	expect("a bit of 2.0 at 1.17", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list),
	       -FI_ENODATA);
	hints->caps &= ~own;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list));
	expect("the bit is not told at 1.17", list->caps & own, 0);
	fi_freeinfo(list);
	fi_freeinfo(hints);
}

/* FI_TAGGED_MULTI_RECV: one tagged buffer for many messages. */
static void tagged_multi(void)
{
	struct fi_info *all = info;
	struct fi_cq_err_entry e;
	struct side s = { 0 };
	size_t min = 1;

	newer_bits(FI_TAGGED | FI_TAGGED_MULTI_RECV, FI_TAGGED_MULTI_RECV);
	info = ask_2_0(FI_TAGGED | FI_TAGGED_MULTI_RECV);
	expect("FI_TAGGED_MULTI_RECV at 2.0", info && info->caps & FI_TAGGED_MULTI_RECV, 1);
	expect("of the receive side", !!(info->rx_attr->caps & FI_TAGGED_MULTI_RECV), 1);
	expect("not of the other", !!(info->tx_attr->caps & FI_TAGGED_MULTI_RECV), 0);
	open_domain(&s);
	enable(&s);
	know(&s, &s);
	must("fi_setopt", fi_setopt(&s.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min,
				    sizeof min));
	must("fi_trecvmsg", tagged_receive(&s, 24, FI_ADDR_UNSPEC, 8, 3, FI_MULTI_RECV));
	for (uint64_t i = 0; i < 3; i++) {
		must("fi_tinject", fi_tinject(s.ep, "eight by", 8, s.self, 9 + i));
		expect("a message of a tagged multi-receive", next(&s, NULL, &e), 0);
		expect("its tag", e.tag, 9 + i);
		expect("its kind, and the last", e.flags & (FI_MSG | FI_TAGGED | FI_MULTI_RECV),
		       FI_TAGGED | (i == 2 ? FI_MULTI_RECV : 0));
	}
	expect("FI_MULTI_RECV with FI_PEEK",
	       tagged_receive(&s, 24, FI_ADDR_UNSPEC, 8, 3, FI_MULTI_RECV | FI_PEEK),
	       -FI_EBADFLAGS);
	done(&s);
	fi_freeinfo(info);
	info = all;
}

/* FI_TAGGED_DIRECTED_RECV and FI_EXACT_DIRECTED_RECV: whose source counts, and has to be named. */
static void directed(void)
{
	const uint64_t both = FI_TAGGED_DIRECTED_RECV | FI_EXACT_DIRECTED_RECV;
	struct fi_info *all = info;
	struct fi_cq_err_entry e;
	struct side s = { 0 };

	newer_bits(FI_TAGGED | FI_TAGGED_DIRECTED_RECV, FI_TAGGED_DIRECTED_RECV);
	newer_bits(FI_TAGGED | FI_EXACT_DIRECTED_RECV, FI_EXACT_DIRECTED_RECV);
	info = ask_2_0(FI_MSG | FI_TAGGED);
	expect("directed bits unasked", info->caps & (both | FI_DIRECTED_RECV), 0);
	fi_freeinfo(info);
	info = ask_2_0(FI_MSG | FI_TAGGED | both);
	expect("directed bits at 2.0", (info->caps & info->rx_attr->caps & both) == both, 1);
	expect("not of the transmit side", info->tx_attr->caps & both, 0);
	open_domain(&s);
	enable(&s);
	know(&s, &s);
	expect("fi_trecv from anybody", fi_trecv(s.ep, big, 8, NULL, FI_ADDR_UNSPEC, 1, 0, &s),
	       -FI_EINVAL);
	expect("fi_trecv from nobody", fi_trecv(s.ep, big, 8, NULL, s.self + 9, 1, 0, &s),
	       -FI_EINVAL);
	expect("a peek from anybody", tagged_receive(&s, 0, FI_ADDR_UNSPEC, 1, 0, FI_PEEK),
	       -FI_EINVAL);
	must("fi_trecv", fi_trecv(s.ep, big, 8, NULL, s.self, 1, 0, &s));
	must("fi_tinject", fi_tinject(s.ep, "eight by", 8, s.self, 1));
	expect("a message of an exact source", next(&s, NULL, &e), 0);
	must("fi_recv from anybody", fi_recv(s.ep, big, 8, NULL, FI_ADDR_UNSPEC, &s));
	must("fi_inject", fi_inject(s.ep, "eight by", 8, s.self));
	expect("an untagged message", next(&s, NULL, &e), 0);
	done(&s);
	fi_freeinfo(info);
	info = all;
}

int main(void)
{
	struct side a = { 0 }, b = { 0 };

	info = ask(FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC);
	infos();
	open_domain(&a);
	open_domain(&b);
	before_enable(&a);
	enable(&b);
	know(&a, &b);
	know(&a, &a);
	know(&b, &a);
	sends(&a);
	messages(&a, &b);
	peeks(&a, &b);
	atomics(&a);
	remote(&a, &b);
	everything(&a, &b);
	objects(&a);
	default_flags(&a);
	formats(&a, &b);
	without_tagged();
	tagged_multi();
	directed();
	polls(&a, &b);
	all_posted(&a, &b);
	forks(&a, &b);
	done(&a);
	done(&b);
	fi_freeinfo(info);
	printf("%d bad\n", bad);
	return bad != 0;
}
