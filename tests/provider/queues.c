/*
 * Completion queues that hold whatever their endpoints may have outstanding, of the default size
 * and of a size that says less. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

enum { ENDS = 16, PATIENCE = 2 };

static struct fi_info *info;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep[ENDS];
static fi_addr_t name[ENDS];
static char in[64], out[64];
/* Completions that were read, by their flag. */
static long sent, received, written, released;

static void read_queue(void)
{
	struct fi_cq_tagged_entry e[16];
	ssize_t n = fi_cq_read(cq, e, 16);

	if (n == -FI_EAGAIN)
		return;
	must("fi_cq_read", n);
	for (ssize_t i = 0; i < n; i++) {
		sent += !!(e[i].flags & FI_SEND);
		written += !!(e[i].flags & FI_REMOTE_WRITE);
		released += !!(e[i].flags & FI_MULTI_RECV);
		received += (e[i].flags & FI_RECV) && e[i].len > 0;
	}
}

/* Whether a call goes through while the queue is read. */
#define PASSES(call)                                                        \
	({                                                                  \
		ssize_t ret_;                                               \
		double end_ = now() + PATIENCE;                             \
		while ((ret_ = (call)) == -FI_EAGAIN && now() < end_)       \
			read_queue();                                       \
		ret_;                                                       \
	})

static void wait_for(const char *what, long *count, long want)
{
	double end = now() + PATIENCE;

	while (*count < want && now() < end)
		read_queue();
	expect(what, *count, want);
}

static void open_all(struct fid_fabric *fabric, size_t size)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = size };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };

	sent = received = written = released = 0;
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	for (int i = 0; i < ENDS; i++) {
		must("fi_endpoint", fi_endpoint(domain, info, &ep[i], NULL));
		must("bind", fi_ep_bind(ep[i], &cq->fid, FI_TRANSMIT | FI_RECV));
		must("bind", fi_ep_bind(ep[i], &av->fid, 0));
		must("fi_enable", fi_enable(ep[i]));
		name[i] = known(av, ep[i]);
	}
}

static void close_all(void)
{
	for (int i = 0; i < ENDS; i++)
		must("close", fi_close(&ep[i]->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
}

/* Every receive that the endpoints may have posted, and what else goes on beside them. */
static void full(struct fid_fabric *fabric, size_t size)
{
	struct iovec iov = { in, sizeof in };
	struct fi_msg multi = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC };
	static char window[8];
	long most = (long) info->rx_attr->size, posted = 0;
	struct fid_mr *mr;

	open_all(fabric, size);
	must("fi_mr_reg", fi_mr_reg(domain, window, sizeof window, FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
	/* The last has a place left for a multi-receive. */
	while (posted < ENDS * most - 1
	       && PASSES(fi_trecv(ep[posted / most], in, sizeof in, NULL, FI_ADDR_UNSPEC,
				  posted % most, 0, NULL)) == 0)
		posted++;
	expect("receives posted", posted, ENDS * most - 1);
	must("a multi-receive", PASSES(fi_recvmsg(ep[ENDS - 1], &multi, FI_MULTI_RECV)));
	for (int i = 0; i < ENDS; i++)
		expect("a send beside them",
		       PASSES(fi_tsend(ep[i], out, 8, NULL, name[(i + 1) % ENDS], 5, NULL)), 0);
	expect("a send to the multi-receive", PASSES(fi_send(ep[0], out, 8, NULL, name[ENDS - 1], NULL)), 0);
	wait_for("sends ended", &sent, ENDS + 1);
	wait_for("messages came", &received, ENDS + 1);
	expect("a write with data",
	       PASSES(fi_writedata(ep[0], out, 8, NULL, 9, name[1], 0, 7, NULL)), 0);
	wait_for("its data came", &written, 1);
	must("close", fi_close(&mr->fid));
	close_all();
}

int main(void)
{
	struct fi_info *hints = fi_allocinfo();
	struct fid_fabric *fabric;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_MULTI_RECV;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	full(fabric, 0);
	full(fabric, 16);
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
