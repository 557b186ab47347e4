/*
 * Regions inside of regions (base_mr), regions for one operation, and memory that goes away once
 * its region is closed.
 */
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include <rdma/fi_rma.h>

#include "check.h"

#define ALL (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define LONG (1 << 20)

/* FI_MR_SINGLE_USE of 2.0. */
#define SINGLE_USE (1ULL << 41)

/* struct fi_mr_attr with what 1.19 to 2.0 appended. */
struct attr {
	struct fi_mr_attr attr;
	void *hmem_data;
	size_t page_size;
	const struct fid_mr *base_mr;
	size_t sub_mr_cnt;
};

static struct fi_info *info;

struct side {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t self;
};

static void open_side(struct side *s, uint32_t version)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_DATA };

	info->fabric_attr->api_version = version;
	must("fi_fabric", fi_fabric(info->fabric_attr, &s->fabric, NULL));
	must("fi_domain", fi_domain(s->fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
	s->self = known(s->av, s->ep);
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
	must("close", fi_close(&s->fabric->fid));
}

/* How what was posted ends: 0 or the error. */
static int outcome(struct side *s, long posted)
{
	struct fi_cq_data_entry entry;
	struct fi_cq_err_entry e = { 0 };

	must("post", posted);
	for (double end = now() + 20; now() < end;) {
		ssize_t n = fi_cq_read(s->cq, &entry, 1);
		if (n == 1)
			return 0;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
			return e.err;
		}
	}
	return FI_ETIMEDOUT;
}

static int put(struct side *s, uint64_t key, uint64_t addr, size_t len)
{
	static char ones[8192];

	memset(ones, 1, sizeof ones);
	return outcome(s, fi_write(s->ep, ones, len, NULL, s->self, addr, key, NULL));
}

static int take(struct side *s, uint64_t key, uint64_t addr, size_t len, char *to)
{
	return outcome(s, fi_read(s->ep, to, len, NULL, s->self, addr, key, NULL));
}

/* A region of a part of `base`. */
static int part(struct side *s, const void *base, char *at, size_t len, uint64_t access,
		uint64_t key, uint64_t flags, struct fid_mr **mr)
{
	struct iovec iov = { at, len };
	struct attr attr = {
		.attr = { .mr_iov = &iov, .iov_count = 1, .access = access, .requested_key = key },
		.base_mr = base,
		.sub_mr_cnt = 3,
	};

	return fi_mr_regattr(s->domain, &attr.attr, flags, mr);
}

static void parts(void)
{
	static char memory[8192], read[2048];
	struct side s = { 0 }, other = { 0 };
	struct iovec two[2] = { { memory, 1000 }, { memory + 4096, 1000 } };
	struct fid_mr *base, *sub, *inner, *gap, *mr;

	open_side(&s, FI_VERSION(2, 0));
	open_side(&other, FI_VERSION(2, 0));
	must("fi_mr_reg", fi_mr_reg(s.domain, memory, 4096, ALL, 0, 1, 0, &base, NULL));
	expect("a part", part(&s, base, memory + 1024, 1024, FI_REMOTE_READ, 2, 0, &sub), 0);
	expect("its key is its own", fi_mr_key(sub) == 2 && fi_mr_key(base) == 1, 1);
	expect("a write by the base's key", put(&s, 1, 1024, 8), 0);
	expect("a read by the part's", take(&s, 2, 0, 1024, read), 0);
	expect("of the same memory", read[0] == 1 && read[7] == 1 && read[8] == 0, 1);
	expect("a write by the part's key", put(&s, 2, 0, 8), FI_EACCES);
	expect("a read behind the part", take(&s, 2, 1020, 8, read), FI_EACCES);
	/* More rights than the part that it is in. */
	expect("a part of a part", part(&s, sub, memory + 1100, 100, ALL, 3, 0, &inner), 0);
	expect("a write by its key", put(&s, 3, 0, 100), 0);
	expect("where it is", memory[1100] == 1 && memory[1199] == 1 && !memory[1200], 1);

	expect("it begins before its base", part(&s, sub, memory + 1023, 9, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("it ends behind it", part(&s, base, memory + 4000, 97, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("it is elsewhere", part(&s, base, read, 8, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("it is empty", part(&s, base, memory, 0, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("its end wraps", part(&s, base, memory, SIZE_MAX, ALL, 4, 0, &mr) < 0, 1);
	expect("the key of its base", part(&s, base, memory, 8, ALL, 1, 0, &mr), -FI_ENOKEY);
	expect("a base that is none", part(&s, s.cq, memory, 8, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("of another domain", part(&other, base, memory, 8, ALL, 4, 0, &mr), -FI_EINVAL);
	expect("for one operation", part(&s, base, memory, 8, ALL, 4, SINGLE_USE, &mr), 0);
	expect("it is used", put(&s, 4, 0, 8), 0);
	expect("once", put(&s, 4, 0, 8), FI_EKEYREJECTED);
	expect("its key is taken until it is closed",
	       part(&s, base, memory, 8, ALL, 4, 0, &gap), -FI_ENOKEY);
	must("close", fi_close(&mr->fid));
	expect("of a device's memory", part(&s, base, memory, 8, ALL, 4, 1ULL << 40, &mr),
	       -FI_EBADFLAGS);
	expect("what was refused has no key", put(&s, 4, 0, 8), FI_EKEYREJECTED);
	/* Pieces of memory do not become one by lying in one region. */
	must("fi_mr_regv", fi_mr_regv(s.domain, two, 2, ALL, 0, 5, 0, &gap, NULL));
	expect("in the second piece", part(&s, gap, memory + 4100, 50, ALL, 4, 0, &mr), 0);
	must("close", fi_close(&mr->fid));
	expect("between the pieces", part(&s, gap, memory + 900, 200, ALL, 4, 0, &mr), -FI_EINVAL);
	must("close", fi_close(&gap->fid));

	expect("a base is closed after its parts", fi_close(&base->fid), -FI_EBUSY);
	expect("so is a part with parts", fi_close(&sub->fid), -FI_EBUSY);
	expect("and they go on", take(&s, 2, 0, 8, read), 0);
	must("close", fi_close(&inner->fid));
	expect("its key is gone", put(&s, 3, 0, 8), FI_EKEYREJECTED);
	must("close", fi_close(&sub->fid));
	expect("and its", take(&s, 2, 0, 8, read), FI_EKEYREJECTED);
	expect("the base stays", put(&s, 1, 0, 8), 0);
	must("close", fi_close(&base->fid));
	close_side(&s);
	close_side(&other);

	/* A program of an older interface has something else behind its attributes. */
	open_side(&s, FI_VERSION(1, 17));
	expect("before 2.0", part(&s, (void *) 1, memory, 8, ALL, 4, 0, &mr), 0);
	must("close", fi_close(&mr->fid));
	close_side(&s);
}

/* Regions that are good for one operation of a peer, of any kind. */
static void single(void)
{
	static char memory[LONG], other[LONG];
	struct side s = { 0 };
	struct fid_mr *mr;

	open_side(&s, FI_VERSION(1, 17));
	for (int kind = 0; kind < 4; kind++) {
		size_t len = kind % 2 ? LONG : 8;
		bool reads = kind / 2;
		memset(memory, 0, LONG);
		memset(other, 7, LONG);
		must("fi_mr_reg", fi_mr_reg(s.domain, memory, LONG, ALL, 0, 6, SINGLE_USE, &mr, NULL));
		expect("out of bounds is no use", put(&s, 6, LONG - 4, 8), FI_EACCES);
		if (reads)
			expect("a read", take(&s, 6, 0, len, other), 0);
		else
			expect("a write",
			       outcome(&s, fi_write(s.ep, other, len, NULL, s.self, 0, 6, NULL)), 0);
		expect("all of it", memcmp(memory, other, len), 0);
		expect("no write more", put(&s, 6, 0, 8), FI_EKEYREJECTED);
		expect("no read more", take(&s, 6, 0, 8, other), FI_EKEYREJECTED);
		expect("nothing was written", memory[0], reads ? 0 : 7);
		must("close", fi_close(&mr->fid));
	}
	close_side(&s);
}

/* Once a region is closed its memory is the program's to give back. */
static void unmapped(void)
{
	static char source[LONG], again[LONG];
	struct side s = { 0 };
	struct fid_mr *mr;
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *memory = mmap(NULL, LONG, PROT_READ | PROT_WRITE, flags, -1, 0);

	memset(source, 7, sizeof source);
	open_side(&s, FI_VERSION(1, 17));
	for (int round = 0; round < 20; round++) {
		must("fi_mr_reg", fi_mr_reg(s.domain, memory, LONG, ALL, 0, 9, 0, &mr, NULL));
		expect("a long write",
		       outcome(&s, fi_write(s.ep, source, LONG, NULL, s.self, 0, 9, NULL)), 0);
		expect("is there", memcmp(memory, source, LONG), 0);
		/* One on its way: it ends, and nothing of it comes once the region is closed. */
		if (round % 2)
			must("fi_write", fi_write(s.ep, source, LONG, NULL, s.self, 0, 9, NULL));
		else
			must("fi_read", fi_read(s.ep, again, LONG, NULL, s.self, 0, 9, NULL));
		for (int turn = 0; turn < round / 4; turn++)
			fi_cq_read(s.cq, NULL, 0);
		must("close", fi_close(&mr->fid));
		must("munmap", munmap(memory, LONG));
		if (round % 3 == 0) {
			/* Somebody else gets the pages. */
			void *next = mmap(memory, LONG, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0);
			expect("the same place", next == memory, 1);
		}
		outcome(&s, 0);
		expect("its key is gone",
		       outcome(&s, fi_write(s.ep, source, 64, NULL, s.self, 0, 9, NULL)),
		       FI_EKEYREJECTED);
		if (round % 3 == 0) {
			for (int i = 0; i < LONG; i += 4096)
				if (memory[i])
					expect("others' memory is as it was", i, -1);
			munmap(memory, LONG);
		}
		memory = mmap(NULL, LONG, PROT_READ | PROT_WRITE, flags, -1, 0);
	}
	munmap(memory, LONG);
	close_side(&s);
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_RMA;
	hints->ep_attr->type = FI_EP_RDM;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	parts();
	single();
	unmapped();
	fi_freeinfo(info);
	fi_freeinfo(hints);
	printf("ok end\n");
	return bad != 0;
}
