/*
 * pair COUNT PROVIDER [OTHER]: one thread owns two endpoints, each in a domain of its own, and sends
 * COUNT tagged messages of 64 bytes from one to the other: posts the receive, sends, polls to both
 * completions. Says nanoseconds a message for every 1000 of them. With OTHER the two send 1000 by
 * turns, and what both took stands in one line.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

enum { LEN = 64, WARM_UP = 20000, BATCH = 1000 };

struct end {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t peer;
	char buf[LEN];
};

static void must(const char *what, long ret)
{
	if (ret < 0) {
		fprintf(stderr, "%s: %s\n", what, fi_strerror((int) -ret));
		exit(1);
	}
}

static void open_end(struct end *e, struct fi_info *info)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .size = 1024 };
	struct fi_av_attr av = { .type = FI_AV_TABLE };

	must("fi_fabric", fi_fabric(info->fabric_attr, &e->fabric, NULL));
	must("fi_domain", fi_domain(e->fabric, info, &e->domain, NULL));
	must("fi_cq_open", fi_cq_open(e->domain, &cq, &e->cq, NULL));
	must("fi_av_open", fi_av_open(e->domain, &av, &e->av, NULL));
	must("fi_endpoint", fi_endpoint(e->domain, info, &e->ep, NULL));
	must("bind", fi_ep_bind(e->ep, &e->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(e->ep, &e->av->fid, 0));
	must("fi_enable", fi_enable(e->ep));
}

static void know(struct end *e, struct end *other)
{
	char name[256];
	size_t len = sizeof name;
	must("fi_getname", fi_getname(&other->ep->fid, name, &len));
	must("fi_av_insert", fi_av_insert(e->av, name, 1, &e->peer, 0, NULL) - 1);
}

static int take(struct end *e)
{
	struct fi_cq_tagged_entry entry;
	ssize_t n = fi_cq_read(e->cq, &entry, 1);
	if (n != -FI_EAGAIN)
		must("fi_cq_read", n);
	return n == 1;
}

/* What callgrind counts in. */
__attribute__((noipa)) void exchange(struct end *a, struct end *b, long count)
{
	struct fi_context2 sent, received;
	ssize_t ret;
	for (long i = 0; i < count; i++) {
		int to_come = 2;
		must("fi_trecv", fi_trecv(b->ep, b->buf, LEN, NULL, FI_ADDR_UNSPEC, 7, 0, &received));
		while ((ret = fi_tsend(a->ep, a->buf, LEN, NULL, a->peer, 7, &sent)) == -FI_EAGAIN)
			take(b), take(a);
		must("fi_tsend", ret);
		while (to_come > 0) {
			to_come -= take(b);
			if (to_come > 0)
				to_come -= take(a);
		}
	}
}

struct pair {
	struct end a, b;
};

static void open_pair(struct pair *p, const char *provider)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_TAGGED;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	hints->fabric_attr->prov_name = strdup(provider);
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	open_end(&p->a, info);
	open_end(&p->b, info);
	know(&p->a, &p->b);
	know(&p->b, &p->a);
	exchange(&p->a, &p->b, WARM_UP);
}

static double batch(struct pair *p)
{
	struct timespec from, to;
	clock_gettime(CLOCK_MONOTONIC, &from);
	exchange(&p->a, &p->b, BATCH);
	clock_gettime(CLOCK_MONOTONIC, &to);
	return ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / BATCH;
}

int main(int argc, char **argv)
{
	static struct pair pairs[2];
	int n = argc - 2;

	if (n < 1 || n > 2)
		return 2;
	for (int i = 0; i < n; i++)
		open_pair(&pairs[i], argv[2 + i]);
	for (long done = 0; done < atol(argv[1]); done += BATCH)
		for (int i = 0; i < n; i++)
			printf("%.3f%c", batch(&pairs[i]), i == n - 1 ? '\n' : ' ');
	return 0;
}
