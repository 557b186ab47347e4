/*
 * limits CASE: what calls return when the system has nothing left, which is named by CASE. One line
 * for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>

#include "check.h"

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;

/* Takes every descriptor, or gives them all back. */
static void exhaust(int yes)
{
	static int taken[1 << 16], count;

	while (yes && (taken[count] = open("/dev/null", O_RDONLY)) >= 0)
		count++;
	while (!yes && count > 0)
		close(taken[--count]);
}

static void descriptors(void)
{
	struct fi_cq_attr cq = { .wait_obj = FI_WAIT_FD };
	struct fi_cntr_attr cntr = { .wait_obj = FI_WAIT_FD };
	struct fi_eq_attr eq = { .wait_obj = FI_WAIT_FD };
	struct fid_domain *other;
	struct fid_cntr *c;
	struct fid_eq *e;
	struct fid_cq *q;
	struct fid_mr *mr;
	void *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	exhaust(1);
	expect("fi_domain", fi_domain(fabric, info, &other, NULL), -FI_EMFILE);
	expect("fi_cq_open", fi_cq_open(domain, &cq, &q, NULL), -FI_EMFILE);
	expect("fi_cntr_open", fi_cntr_open(domain, &cntr, &c, NULL), -FI_EMFILE);
	expect("fi_eq_open", fi_eq_open(fabric, &eq, &e, NULL), -FI_EMFILE);
	expect("fi_mr_reg of shared memory",
	       fi_mr_reg(domain, shared, 4096, FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL), -FI_EMFILE);
	exhaust(0);
	must("fi_mr_reg", fi_mr_reg(domain, shared, 4096, FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
	must("close", fi_close(&mr->fid));
	must("close", fi_close(&domain->fid));
}

static void space(void)
{
	expect("fi_domain", fi_domain(fabric, info, &domain, NULL), -FI_ENOSPC);
}

/* Room for a domain, and none for what it needs when it sends. */
static void later(void)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_CONTEXT };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	static char junk[4096];
	struct fi_cq_err_entry e = { 0 };
	struct fi_cq_entry entry;
	struct fid_domain *target;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_ep *ep, *other;
	double end = now() + 10;
	int fd;

	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_domain", fi_domain(fabric, info, &target, NULL));
	must("fi_endpoint", fi_endpoint(target, info, &other, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	fd = open("/dev/shm/junk", O_CREAT | O_WRONLY, 0600);
	while (write(fd, junk, sizeof junk) > 0)
		;
	must("fi_send", fi_send(ep, junk, 8, NULL, known(av, other), &e));
	while (now() < end && fi_cq_read(cq, &entry, 1) != -FI_EAVAIL)
		;
	expect("fi_cq_readerr", fi_cq_readerr(cq, &e, 0), 1);
	expect("the error", e.err, FI_ENOSPC);
	must("close", fi_close(&other->fid));
	must("close", fi_close(&target->fid));
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
}

/* As many peers of `count` as are inserted, or as many as `most`, in a vector opened for `told`. */
static void peers(int count, int most, int told)
{
	static unsigned char names[20000][16];
	static fi_addr_t at[20000];
	struct fi_av_attr attr = { .type = FI_AV_TABLE, .count = told };
	struct fid_av *av;

	for (int i = 0; i < count; i++) {
		names[i][0] = 2;
		names[i][4] = i >> 8;
		names[i][5] = i;
		names[i][8] = 1;
	}
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_av_open", fi_av_open(domain, &attr, &av, NULL));
	expect("fi_av_insert", fi_av_insert(av, names, count, at, 0, NULL), most);
	expect("the last that was inserted", (long) at[most - 1], most - 1);
	if (most < count)
		expect("the next", at[most] == FI_ADDR_NOTAVAIL, 1);
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
}

int main(int argc, char **argv)
{
	struct fi_info *hints = fi_allocinfo();

	hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	if (argc > 1 && strcmp(argv[1], "descriptors") == 0)
		descriptors();
	else if (argc > 1 && strcmp(argv[1], "later") == 0)
		later();
	else if (argc > 4 && strcmp(argv[1], "peers") == 0)
		peers(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
	else
		space();
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
