/*
 * Wait sets and datagram endpoints through the headers that are installed: two domains of one
 * process. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include "check.h"

enum { LONGEST = 65536, MS = 60000 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t peer;
};

static struct fid_fabric *fabric;
static struct fi_info *info;
static struct fid_wait *set;
static struct side a, b;
static char in[LONGEST + 1], out[LONGEST + 1];

static void open_side(struct side *s, struct fid_wait *in_set)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_MSG, .wait_set = in_set };
	cq.wait_obj = in_set ? FI_WAIT_SET : FI_WAIT_NONE;
	must("fi_domain", fi_domain(fabric, info, &s->domain, NULL));
	must("fi_av_open", fi_av_open(s->domain, &av, &s->av, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
	must("fi_endpoint", fi_endpoint(s->domain, info, &s->ep, NULL));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &s->av->fid, 0));
	must("fi_enable", fi_enable(s->ep));
}

static void know(struct side *s, struct side *other)
{
	s->peer = known(s->av, other->ep);
}

/* Sends to `b` until it has been told to be quiet. */
static void *send_later(void *len)
{
	struct fi_cq_msg_entry e;
	usleep(100000);
	must("fi_send", fi_send(a.ep, out, (size_t) len, NULL, a.peer, NULL));
	while (fi_cq_read(a.cq, &e, 1) != 1)
		usleep(1000);
	return NULL;
}

static void message(const char *name, size_t len)
{
	struct fi_cq_msg_entry e = { 0 };
	pthread_t thread;
	ssize_t n = -FI_EAGAIN;
	memset(in, 0, sizeof in);
	memset(out, 7, sizeof out);
	must("fi_recv", fi_recv(b.ep, in, sizeof in, NULL, b.peer, in));
	pthread_create(&thread, NULL, send_later, (void *) len);
	for (double end = now() + 60; n == -FI_EAGAIN && now() < end;) {
		must("fi_wait", fi_wait(set, MS));
		n = fi_cq_read(b.cq, &e, 1);
	}
	pthread_join(thread, NULL);
	expect(name, n == 1 && e.len == len && !memcmp(in, out, len) && in[len] == 0, 1);
	expect("nothing more", fi_wait(set, 0), -FI_ETIMEDOUT);
}

static void members(void)
{
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_SET, .wait_set = set, .flags = FI_WRITE };
	struct fi_cntr_attr cntr_attr = { .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fi_cq_attr bad = { .wait_obj = FI_WAIT_SET };
	struct fi_eq_entry event = { .data = 5 };
	struct fid *fids[] = { &set->fid };
	struct pollfd polled = { .events = POLLIN };
	struct fid_cntr *cntr;
	struct fid_cq *cq;
	struct fid_eq *eq;
	uint32_t number;
	double start;

	must("fi_eq_open", fi_eq_open(fabric, &eq_attr, &eq, NULL));
	must("fi_cntr_open", fi_cntr_open(b.domain, &cntr_attr, &cntr, NULL));
	expect("a queue without its set", fi_cq_open(b.domain, &bad, &cq, NULL), -FI_EINVAL);
	start = now();
	expect("fi_wait in vain", fi_wait(set, 50), -FI_ETIMEDOUT);
	expect("it took its time", now() - start >= 0.05, 1);
	expect("fi_trywait", fi_trywait(fabric, fids, 1), 0);
	must("FI_GETWAIT", fi_control(&set->fid, FI_GETWAIT, &polled.fd));
	expect("its descriptor is quiet", poll(&polled, 1, 0), 0);
	must("fi_eq_write", fi_eq_write(eq, 1000, &event, sizeof event, 0));
	expect("an event wakes", fi_wait(set, MS), 0);
	expect("fi_trywait says so", fi_trywait(fabric, fids, 1), -FI_EAGAIN);
	expect("its descriptor is readable", poll(&polled, 1, MS), 1);
	must("fi_eq_read", fi_eq_read(eq, &number, &event, sizeof event, 0));
	expect("it has been read", fi_wait(set, 0), -FI_ETIMEDOUT);
	must("fi_cntr_add", fi_cntr_add(cntr, 1));
	expect("a counter wakes", fi_wait(set, MS), 0);
	expect("close a set in use", fi_close(&set->fid), -FI_EBUSY);
	must("close", fi_close(&eq->fid));
	must("close", fi_close(&cntr->fid));
	expect("who has left does not wake", fi_wait(set, 0), -FI_ETIMEDOUT);
}

/* A child ends its copies of what is in the set: the set is its parent's as well. */
static void forked(void)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_SET, .wait_set = set, .flags = FI_WRITE };
	struct fi_eq_entry event = { .data = 5 };
	struct pollfd polled = { .events = POLLIN };
	struct fid_eq *eq;
	uint32_t number;
	pid_t child;

	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
	must("FI_GETWAIT", fi_control(&set->fid, FI_GETWAIT, &polled.fd));
	child = fork();
	if (child == 0)
		_exit(fi_close(&eq->fid) != 0);
	expect("a child", child > 0 && waitpid(child, NULL, 0) == child, 1);
	must("fi_eq_write", fi_eq_write(eq, 1000, &event, sizeof event, 0));
	expect("what a child has closed still wakes", poll(&polled, 1, 5000), 1);
	must("fi_eq_read", fi_eq_read(eq, &number, &event, sizeof event, 0));
	must("close", fi_close(&eq->fid));
}

/* Waits for the set until it is told to end. */
static void *wait_on(void *end)
{
	while (!__atomic_load_n((int *) end, __ATOMIC_ACQUIRE)) {
		int ret = fi_wait(set, 0);
		if (ret && ret != -FI_ETIMEDOUT)
			return "BAD";
	}
	return NULL;
}

static void leaving(void)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fid_eq *eq;
	pthread_t thread;
	void *ret;
	int end = 0;

	pthread_create(&thread, NULL, wait_on, &end);
	for (int i = 0; i < 20000; i++) {
		must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
		must("close", fi_close(&eq->fid));
	}
	__atomic_store_n(&end, 1, __ATOMIC_RELEASE);
	pthread_join(thread, &ret);
	expect("members leave while somebody waits", ret == NULL, 1);
}

static void refusals(void)
{
	struct fi_wait_attr mutex = { .wait_obj = FI_WAIT_MUTEX_COND };
	struct fi_wait_attr flags = { .wait_obj = FI_WAIT_FD, .flags = 1 };
	struct fid_wait *other;
	expect("a set by a mutex", fi_wait_open(fabric, &mutex, &other), -FI_ENOSYS);
	expect("a set with flags", fi_wait_open(fabric, &flags, &other), -FI_EBADFLAGS);
	expect("a datagram that is too long",
	       fi_send(a.ep, out, LONGEST + 1, NULL, a.peer, NULL), -FI_EMSGSIZE);
}

static void close_side(struct side *s)
{
	must("close", fi_close(&s->ep->fid));
	must("close", fi_close(&s->cq->fid));
	must("close", fi_close(&s->av->fid));
	must("close", fi_close(&s->domain->fid));
}

int main(void)
{
	struct fi_wait_attr attr = { .wait_obj = FI_WAIT_FD };
	struct fi_info *hints = fi_allocinfo();
	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_DGRAM;
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	expect("fi_wait_open", fi_wait_open(fabric, &attr, &set), 0);
	open_side(&a, NULL);
	open_side(&b, set);
	know(&a, &b);
	know(&b, &a);
	message("a message wakes", 8);
	message("and the longest", LONGEST);
	members();
	forked();
	leaving();
	refusals();
	close_side(&a);
	close_side(&b);
	expect("close the set", fi_close(&set->fid), 0);
	expect("close the fabric", fi_close(&fabric->fid), 0);
	fi_freeinfo(hints);
	fi_freeinfo(info);
	printf("ok end\n");
	return 0;
}
