/*
 * Remote atomics on words that the target changes by the processor's own atomic instructions
 * meanwhile: every update counts (AR8 and beyond). One line for each check: "ok NAME" or "BAD NAME:
 * got X, want Y".
 */
#include <pthread.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>

#include "check.h"

enum { ROUNDS = 2500 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct side a, b;
static fi_addr_t to;

/* What both change, in lines of their own. */
static struct {
	uint64_t u64, pad64[7];
	uint32_t u32, pad32[15];
	uint16_t u16, pad16[31];
	uint8_t u8, pad8[63];
	uint64_t swapped, pad[7];
} memory __attribute__((aligned(64)));

/* Times that the target has added 1 to the sums and to the last word, until it is told to stop. */
static int stop;
static uint64_t added, swapped;

/*
 * The last word rests for 1 to 8,192 rounds after each change: a compare and swap whose round trip
 * is longer than a rest cannot win, and one that always wins meets no change.
 */
static void *target(void *arg)
{
	uint64_t next = 0, random = 1;

	for (; !__atomic_load_n(&stop, __ATOMIC_RELAXED); added++) {
		__atomic_fetch_add(&memory.u64, 1, __ATOMIC_RELAXED);
		__atomic_fetch_add(&memory.u32, 1, __ATOMIC_RELAXED);
		__atomic_fetch_add(&memory.u16, 1, __ATOMIC_RELAXED);
		__atomic_fetch_add(&memory.u8, 1, __ATOMIC_RELAXED);
		if (added < next)
			continue;
		uint64_t was = __atomic_load_n(&memory.swapped, __ATOMIC_RELAXED);
		while (!__atomic_compare_exchange_n(&memory.swapped, &was, was + 1, 0,
						    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			;
		swapped++;
		random = random * 6364136223846793005u + 1442695040888963407u;
		next = added + ((uint64_t) 1 << (random >> 33) % 14);
	}
	return arg;
}

static void open_side(struct side *s)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_av_attr av = { .type = FI_AV_TABLE };

	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
}

static int completed(void)
{
	struct fi_cq_entry e[8];
	ssize_t n;

	fi_cq_read(b.cq, e, 0);
	n = fi_cq_read(a.cq, e, 8);
	if (n != -FI_EAGAIN)
		must("fi_cq_read", n);
	return n > 0 ? (int) n : 0;
}

static uint64_t offset_of(void *at)
{
	return (uint64_t) ((char *) at - (char *) &memory);
}

/* Adds 1 to `at` by an operation that fetches and by one that does not, ROUNDS times each. */
static void add(const char *name, void *at, enum fi_datatype type, void *one)
{
	uint64_t old[64];

	for (int i = 0, out = 0; i < 2 * ROUNDS || out > 0; out -= completed()) {
		ssize_t ret;
		if (i == 2 * ROUNDS)
			continue;
		if (i % 2)
			ret = fi_atomic(a.ep, one, 1, NULL, to, offset_of(at), 7, type, FI_SUM, NULL);
		else
			ret = fi_fetch_atomic(a.ep, one, 1, NULL, &old[i / 2 % 64], NULL, to,
					      offset_of(at), 7, type, FI_SUM, NULL);
		if (ret != -FI_EAGAIN) {
			must(name, ret);
			i++, out++;
		}
	}
}

/* Tries ROUNDS times to add 1 to the last word by compare and swap; returns how often it did. */
static uint64_t swap(void)
{
	uint64_t old = 0, done = 0;

	for (int i = 0; i < ROUNDS; i++) {
		uint64_t compare = old, value = old + 1;
		must("fi_compare_atomic",
		     fi_compare_atomic(a.ep, &value, 1, NULL, &compare, NULL, &old, NULL, to,
				       offset_of(&memory.swapped), 7, FI_UINT64, FI_CSWAP, NULL));
		while (!completed())
			;
		done += old == compare;
	}
	return done;
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();
	pthread_t thread;
	struct fid_mr *mr;
	uint64_t done, one64 = 1;
	uint32_t one32 = 1;
	uint16_t one16 = 1;
	uint8_t one8 = 1;

	hints->caps = FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	open_side(&a);
	open_side(&b);
	to = known(a.av, b.ep);
	must("fi_mr_reg", fi_mr_reg(b.domain, &memory, sizeof memory,
				    FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
	must("pthread_create", -pthread_create(&thread, NULL, target, NULL));
	add("u64", &memory.u64, FI_UINT64, &one64);
	add("u32", &memory.u32, FI_UINT32, &one32);
	add("u16", &memory.u16, FI_UINT16, &one16);
	add("u8", &memory.u8, FI_UINT8, &one8);
	done = swap();
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	expect("u64", (long) memory.u64, (long) (added + 2 * ROUNDS));
	expect("u32", memory.u32, (uint32_t) (added + 2 * ROUNDS));
	expect("u16", memory.u16, (uint16_t) (added + 2 * ROUNDS));
	expect("u8", memory.u8, (uint8_t) (added + 2 * ROUNDS));
	expect("swapped", (long) memory.swapped, (long) (swapped + done));
	expect("some were swapped", done > 0, 1);
	must("close", fi_close(&mr->fid));
	close_side(&a);
	close_side(&b);
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
