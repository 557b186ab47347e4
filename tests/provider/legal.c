/*
 * Calls that are odd and that libfabric's manuals allow. One line for each check: "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static fi_addr_t self;

static struct fi_info *ask(uint32_t version, enum fi_ep_type type)
{
	struct fi_info *hints = fi_allocinfo(), *found = NULL;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	hints->ep_attr->type = type;
	hints->fabric_attr->prov_name = strdup("barewire");
	expect("fi_getinfo", fi_getinfo(version, NULL, NULL, 0, hints, &found), 0);
	fi_freeinfo(hints);
	return found;
}

/* The next completion: its flags, or the error as a negative number. */
static long next(void)
{
	struct fi_cq_tagged_entry e;
	struct fi_cq_err_entry err = { 0 };
	double end = now() + 5;
	ssize_t n;

	while ((n = fi_cq_read(cq, &e, 1)) == -FI_EAGAIN && now() < end)
		;
	if (n == 1)
		return (long) e.flags;
	if (n == -FI_EAVAIL && fi_cq_readerr(cq, &err, 0) == 1)
		return -err.err;
	return n;
}

/* A send and the receive that it is for, in either order. */
static void both(const char *name, long kind)
{
	long all = next() | next();

	expect(name, all > 0 ? all & (FI_SEND | FI_RECV | FI_MSG | FI_TAGGED) : all,
	       FI_SEND | FI_RECV | kind);
}

static void empty(void)
{
	struct fi_msg msg = { .addr = self };
	struct fi_msg_tagged tagged = { .addr = self, .tag = 3 };
	struct fi_msg_rma rma = { .addr = self };

	must("fi_recv", fi_recv(ep, NULL, 0, NULL, FI_ADDR_UNSPEC, NULL));
	expect("fi_send of nothing", fi_send(ep, NULL, 0, NULL, self, NULL), 0);
	both("a message of nothing", FI_MSG);
	must("fi_recvv", fi_recvv(ep, NULL, NULL, 0, FI_ADDR_UNSPEC, NULL));
	expect("fi_sendv of no piece", fi_sendv(ep, NULL, NULL, 0, self, NULL), 0);
	both("a message of no piece", FI_MSG);
	must("fi_recvmsg", fi_recvmsg(ep, &msg, 0));
	expect("fi_sendmsg of no piece", fi_sendmsg(ep, &msg, FI_INJECT | FI_COMPLETION), 0);
	both("an injected message that is told", FI_MSG);
	must("fi_trecvmsg", fi_trecvmsg(ep, &tagged, 0));
	expect("fi_tsendmsg fenced, more to come",
	       fi_tsendmsg(ep, &tagged, FI_FENCE | FI_MORE | FI_DELIVERY_COMPLETE), 0);
	both("a fenced message with nothing behind it", FI_TAGGED);
	must("fi_trecv", fi_trecv(ep, NULL, 0, NULL, FI_ADDR_UNSPEC, 4, 0, NULL));
	expect("fi_tinject of nothing", fi_tinject(ep, NULL, 0, self, 4), 0);
	expect("an injected message of nothing", next() & (FI_RECV | FI_TAGGED), FI_RECV | FI_TAGGED);
	expect("fi_writemsg of no piece", fi_writemsg(ep, &rma, 0), 0);
	expect("a write of no piece", next() & (FI_RMA | FI_WRITE), FI_RMA | FI_WRITE);
	expect("fi_readmsg of no piece", fi_readmsg(ep, &rma, 0), 0);
	expect("a read of no piece", next() & (FI_RMA | FI_READ), FI_RMA | FI_READ);
	expect("fi_cq_read of no entry", fi_cq_read(cq, NULL, 0), -FI_EAGAIN);
}

static void short_buffers(void)
{
	char name[64], text[64] = "untouched";
	size_t len = 0, whole;
	int small = 0;

	expect("fi_getname of no bytes", fi_getname(&ep->fid, NULL, &len), -FI_ETOOSMALL);
	expect("how many it takes", len > 0 && len <= sizeof name, 1);
	must("fi_getname", fi_getname(&ep->fid, name, &len));
	len = 0;
	fi_av_straddr(av, name, NULL, &len);
	expect("how many a text takes", len > 8 && len < sizeof text, 1);
	whole = len;
	len = 5;
	expect("fi_av_straddr of five", fi_av_straddr(av, name, text, &len) == text, 1);
	expect("the beginning, with its end", strlen(text), 4);
	expect("how many it takes", len, (long) whole);
	len = sizeof small;
	expect("fi_getopt of too few", fi_getopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV,
						 &small, &len), -FI_ETOOSMALL);
	expect("how many it takes", len, sizeof(size_t));
}

static void counters(void)
{
	struct fid_cntr *cntr;
	double begun = now();

	must("fi_cntr_open", fi_cntr_open(domain, NULL, &cntr, NULL));
	expect("fi_cntr_wait for nothing", fi_cntr_wait(cntr, 0, 0), 0);
	expect("fi_cntr_wait for no time", fi_cntr_wait(cntr, 1, 0), -FI_ETIMEDOUT);
	expect("it takes none", now() - begun < 1, 1);
	must("fi_cntr_set", fi_cntr_set(cntr, UINT64_MAX));
	expect("fi_cntr_wait for the most", fi_cntr_wait(cntr, UINT64_MAX, -1), 0);
	must("close", fi_close(&cntr->fid));
	expect("fi_trywait for nothing", fi_trywait(fabric, NULL, 0), 0);
}

static void vectors(void)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE, .count = 4, .flags = FI_SYMMETRIC };
	struct fid_av *other;
	fi_addr_t at[4] = { 0 };
	int status[4] = { -1, -1, -1, -1 };
	char names[2][64] = { { 0 } };
	size_t len = sizeof names[0];

	must("fi_av_open FI_SYMMETRIC", fi_av_open(domain, &attr, &other, NULL));
	must("fi_getname", fi_getname(&ep->fid, names[0], &len));
	memmove(names[0] + len, names[1], len);
	expect("fi_av_insert of nothing", fi_av_insert(other, NULL, 0, NULL, 0, NULL), 0);
	expect("fi_av_insert, nowhere to tell", fi_av_insert(other, names, 1, at, FI_SYNC_ERR, NULL),
	       -FI_EINVAL);
	expect("fi_av_insert, one of two", fi_av_insert(other, names, 2, at, FI_SYNC_ERR, status), 1);
	expect("the one", status[0], 0);
	expect("the other", status[1] > 0 && at[1] == FI_ADDR_NOTAVAIL, 1);
	expect("fi_av_insertsvc FI_SYNC_ERR",
	       fi_av_insertsvc(other, "02:00:00:00:01:00", "5", at, FI_SYNC_ERR, &status[2]), 1);
	expect("what became of it", status[2], 0);
	status[2] = -1;
	expect("fi_av_insertsvc of nobody",
	       fi_av_insertsvc(other, "no-host.invalid", "5", at, FI_SYNC_ERR, &status[2]) < 0, 1);
	expect("what became of it", status[2] > 0, 1);
	memset(status, -1, sizeof status);
	expect("fi_av_insertsym FI_SYNC_ERR", fi_av_insertsym(other, "02:00:00:00:02:00", 2, "5", 2, at,
							      FI_SYNC_ERR, status), 4);
	expect("what became of each", status[0] | status[1] | status[2] | status[3], 0);
	expect("fi_av_insertsym, nowhere to tell",
	       fi_av_insertsym(other, "02:00:00:00:03:00", 1, "5", 1, NULL, FI_SYNC_ERR, NULL),
	       -FI_EINVAL);
	expect("fi_av_insertsym without places",
	       fi_av_insertsym(other, "02:00:00:00:03:00", 1, "5", 2, NULL, 0, NULL), 2);
	expect("fi_av_remove of nothing", fi_av_remove(other, NULL, 0, 0), 0);
	must("close", fi_close(&other->fid));
}

/* A passive endpoint in the hints is the handle of every answer, and an endpoint opens with such an
 * answer. Other objects are not copied. */
static void handles(struct fid_pep *pep)
{
	struct fi_info *hints = fi_allocinfo(), *found = NULL, *one;
	struct fid_domain *other;
	struct fid_ep *active;

	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_MSG;
	hints->fabric_attr->prov_name = strdup("barewire");
	hints->handle = &pep->fid;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &found));
	for (one = found; one; one = one->next)
		expect("the handle of a passive endpoint", one->handle == &pep->fid, 1);
	must("fi_domain", fi_domain(fabric, found, &other, NULL));
	must("fi_endpoint", fi_endpoint(other, found, &active, NULL));
	expect("fi_accept of no request", fi_accept(active, NULL, 0), -FI_EOPBADSTATE);
	must("close", fi_close(&active->fid));
	must("close", fi_close(&other->fid));
	fi_freeinfo(found);
	hints->handle = &domain->fid;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &found));
	expect("another handle", found->handle == NULL, 1);
	fi_freeinfo(found);
	fi_freeinfo(hints);
}

static void listeners(void)
{
	struct fi_info *msg = ask(fi_version(), FI_EP_MSG);
	struct fid_pep *pep;
	int backlog = 5;

	must("fi_passive_ep", fi_passive_ep(fabric, msg, &pep, NULL));
	expect("FI_BACKLOG", fi_control(&pep->fid, FI_BACKLOG, &backlog), 0);
	backlog = -1;
	expect("a negative one", fi_control(&pep->fid, FI_BACKLOG, &backlog), -FI_EINVAL);
	expect("no backlog", fi_control(&pep->fid, FI_BACKLOG, NULL), -FI_EINVAL);
	handles(pep);
	must("close", fi_close(&pep->fid));
	fi_freeinfo(msg);
}

/* Receives that are posted when their endpoint is closed are told of, or not told at all. */
static void outstanding(void)
{
	struct fid_ep *other;
	char in[8];
	long told;

	must("fi_endpoint", fi_endpoint(domain, info, &other, NULL));
	must("bind", fi_ep_bind(other, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(other, &av->fid, 0));
	must("fi_enable", fi_enable(other));
	must("fi_recv", fi_recv(other, in, sizeof in, NULL, FI_ADDR_UNSPEC, in));
	expect("bind a vector later", fi_ep_bind(other, &av->fid, 0) < 0, 1);
	expect("bind a queue for nothing", fi_ep_bind(other, &cq->fid, 0), -FI_EBADFLAGS);
	must("close", fi_close(&other->fid));
	told = next();
	expect("a receive of a closed endpoint", told, -FI_ECANCELED);
}

int main(void)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_TAGGED };

	for (int minor = 0; minor <= (int) FI_MINOR(fi_version()) && FI_MAJOR(fi_version()) == 1; minor++)
		fi_freeinfo(ask(FI_VERSION(1, minor), FI_EP_RDM));
	info = ask(fi_version(), FI_EP_RDM);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, NULL, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	self = known(av, ep);
	empty();
	short_buffers();
	counters();
	vectors();
	listeners();
	outstanding();
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
