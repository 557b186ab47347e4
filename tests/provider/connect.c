/*
 * Connected endpoints through the headers that are installed: a listener and those who connect to
 * it in one process, each with a domain of its own. One line for each check: "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#include <poll.h>
#include <signal.h>
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
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

enum { SECONDS = 60, LONG = 3 << 20 };

struct side {
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_ep *ep;
};

static struct fid_fabric *fabric;
static struct fid_eq *eq;
static struct fid_pep *pep;
static struct fi_info *info;
static char server[64];

static struct fi_info *ask(uint64_t flags, const char *node, const char *service)
{
	struct fi_info *hints = fi_allocinfo(), *found;
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->addr_format = FI_SOCKADDR_IN;
	must("fi_getinfo", fi_getinfo(fi_version(), node, service, flags, hints, &found));
	fi_freeinfo(hints);
	return found;
}

static void open_domain(struct side *s, struct fi_info *from)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .size = 64 };
	must("fi_domain", fi_domain(fabric, from, &s->domain, NULL));
	must("fi_cq_open", fi_cq_open(s->domain, &cq, &s->cq, NULL));
}

static void open_ep(struct side *s, struct fi_info *from)
{
	must("fi_endpoint", fi_endpoint(s->domain, from, &s->ep, s));
	must("bind", fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(s->ep, &eq->fid, 0));
}

/* The next event, or -1 for an error, or -2 when time is up. */
static long event(void *entry, size_t len)
{
	uint32_t number = 0;
	ssize_t n = fi_eq_sread(eq, &number, entry, len, SECONDS * 1000, 0);
	return n == -FI_EAVAIL ? -1 : n < 0 ? -2 : (long) number;
}

static void completion(struct side *s, struct side *other, struct fi_cq_tagged_entry *e)
{
	struct fi_cq_tagged_entry unused;
	time_t end = time(NULL) + SECONDS;
	while (fi_cq_read(s->cq, e, 1) != 1) {
		fi_cq_read(other->cq, &unused, 0);
		if (time(NULL) > end) {
			printf("BAD no completion\n");
			exit(1);
		}
	}
}

/* One tagged message. */
static void message(const char *name, struct side *from, struct side *to, size_t len)
{
	static char out[LONG], in[LONG];
	struct fi_cq_tagged_entry got, sent;
	for (size_t i = 0; i < len; i++)
		out[i] = (char) (i * 7 + len);
	memset(in, 0, len);
	must("fi_trecv", fi_trecv(to->ep, in, len, NULL, 0, 5, 0, in));
	must("fi_tsend", fi_tsend(from->ep, out, len, NULL, 0, 5, out));
	completion(to, from, &got);
	completion(from, to, &sent);
	expect(name, got.len == len && !memcmp(in, out, len) && got.op_context == in
		       && sent.op_context == out, 1);
}

static void refusals(struct side *c)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } req;
	struct fi_eq_err_entry err = { 0 };
	struct fid_stx *stx;
	struct fi_info *other = ask(0, "127.0.0.1", "1");
	char data[256] = "no", room[256];
	size_t len = sizeof len, max = 0;

	expect("FI_OPT_CM_DATA_SIZE", fi_getopt(&pep->fid, FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE, &max,
						&len), 0);
	open_ep(c, info);
	expect("fi_stx_context", fi_stx_context(c->domain, NULL, &stx, NULL), 0);
	expect("bind a context", fi_ep_bind(c->ep, &stx->fid, 0), 0);
	expect("bind it twice", fi_ep_bind(c->ep, &stx->fid, 0), -FI_EINVAL);
	expect("close a context in use", fi_close(&stx->fid), 0);
	expect("accept without a request", fi_accept(c->ep, NULL, 0), -FI_EOPBADSTATE);
	expect("shutdown before connecting", fi_shutdown(c->ep, 0), -FI_EOPBADSTATE);
	expect("too much data", fi_connect(c->ep, server, data, max + 1), -FI_EINVAL);
	expect("connect", fi_connect(c->ep, server, data, max), 0);
	expect("connect twice", fi_connect(c->ep, server, data, max), -FI_EOPBADSTATE);
	expect("a request", event(&req, sizeof req), FI_CONNREQ);
	expect("it is for the listener", req.e.fid == &pep->fid, 1);
	expect("its data", memcmp(req.e.data, data, max), 0);
	expect("its information", req.e.info->handle && req.e.info->ep_attr->type == FI_EP_MSG
		       && !strcmp(req.e.info->fabric_attr->prov_name, "barewire"), 1);
	expect("reject", fi_reject(pep, req.e.info->handle, "go away", 8), 0);
	expect("reject twice", fi_reject(pep, req.e.info->handle, NULL, 0), -FI_EBADF);
	fi_freeinfo(req.e.info);
	expect("a refusal", event(&req, sizeof req), -1);
	expect("a look at it", fi_eq_readerr(eq, &err, FI_PEEK), sizeof err);
	expect("the number seen", err.err, FI_ECONNREFUSED);
	expect("a look with another flag", fi_eq_readerr(eq, &err, FI_SEND), -FI_EBADFLAGS);
	memset(&err, 0, sizeof err);
	err.err_data = room;
	err.err_data_size = sizeof room;
	must("fi_eq_readerr", fi_eq_readerr(eq, &err, 0));
	expect("its number", err.err, FI_ECONNREFUSED);
	expect("its endpoint", err.fid == &c->ep->fid && err.context == c, 1);
	expect("what was said", err.err_data_size == 8 && !strcmp(room, "go away"), 1);
	must("close", fi_close(&c->ep->fid));

	open_ep(c, info);
	expect("connect to nobody", fi_connect(c->ep, other->dest_addr, NULL, 0), 0);
	expect("is refused", event(&req, sizeof req), -1);
	memset(&err, 0, sizeof err);
	must("fi_eq_readerr", fi_eq_readerr(eq, &err, 0));
	expect("as nobody listens", err.err, FI_ECONNREFUSED);
	must("close", fi_close(&c->ep->fid));
	fi_freeinfo(other);
}

/* Seconds that the shortest fi_accept took. */
static double accepting = 1;

/* Connects `c` to a new endpoint of `s`. */
static void join(struct side *c, struct side *s, int first)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } req;
	int client = 0, accepted = 0;
	char peer[64], name[64];
	size_t len = sizeof peer, name_len = sizeof name;
	double begun;

	open_ep(c, info);
	must("fi_connect", fi_connect(c->ep, server, "hi", 3));
	expect("a request to accept", event(&req, sizeof req), FI_CONNREQ);
	expect("what it says", strcmp((char *) req.e.data, "hi"), 0);
	if (first)
		open_domain(s, req.e.info);
	open_ep(s, req.e.info);
	begun = now();
	must("fi_accept", fi_accept(s->ep, "welcome", 8));
	if (now() - begun < accepting)
		accepting = now() - begun;
	fi_freeinfo(req.e.info);
	for (int i = 0; i < 2; i++) {
		memset(&req, 0, sizeof req);
		expect("connected", event(&req, sizeof req), FI_CONNECTED);
		client += req.e.fid == &c->ep->fid && !strcmp((char *) req.e.data, "welcome");
		accepted += req.e.fid == &s->ep->fid;
	}
	expect("both ends are told", client == 1 && accepted == 1, 1);
	must("fi_getpeer", fi_getpeer(c->ep, peer, &len));
	must("fi_getname", fi_getname(&s->ep->fid, name, &name_len));
	expect("the peer's name", len == name_len && !memcmp(peer, name, len), 1);
}

static void part(struct side *c, struct side *s)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	int ends = 0;

	must("fi_shutdown", fi_shutdown(c->ep, 0));
	for (int i = 0; i < 2; i++) {
		expect("shut down", event(&end, sizeof end), FI_SHUTDOWN);
		ends += end.e.fid == &c->ep->fid ? 1 : end.e.fid == &s->ep->fid ? 2 : 0;
	}
	expect("both ends, once", ends, 3);
	expect("shut down again", fi_shutdown(s->ep, 0), 0);
	must("close", fi_close(&c->ep->fid));
	must("close", fi_close(&s->ep->fid));
}

/* An error entry of `s`: its number and context. */
static void failed(const char *name, struct side *s, int err, void *context)
{
	struct fi_cq_err_entry e = { 0 };
	struct fi_cq_tagged_entry unused;
	ssize_t n;
	time_t end = time(NULL) + SECONDS;
	while ((n = fi_cq_read(s->cq, &unused, 1)) == -FI_EAGAIN && time(NULL) < end)
		;
	expect(name, n, -FI_EAVAIL);
	if (n == -FI_EAVAIL)
		must("fi_cq_readerr", fi_cq_readerr(s->cq, &e, 0));
	expect(name, e.err, err);
	expect(name, e.op_context == context, 1);
}

/* Nothing waits for a connection that is over, and what came before the end is received. With
 * `closes` the other end closes its endpoint, else it shuts the connection down. */
static void over(struct side *c, struct side *s, int closes)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	struct fi_cq_tagged_entry got = { 0 };
	static char in[2][64];

	join(c, s, 0);
	must("fi_trecv", fi_trecv(s->ep, in[0], 64, NULL, 0, 5, 0, in[0]));
	must("fi_recv", fi_recv(s->ep, in[1], 64, NULL, 0, in[1]));
	must("fi_tsend", fi_tsend(c->ep, "early", 6, NULL, 0, 6, NULL));
	completion(c, s, &got);
	if (closes) {
		must("close", fi_close(&c->ep->fid));
	} else {
		must("fi_shutdown", fi_shutdown(c->ep, 0));
		expect("here it ends", event(&end, sizeof end), FI_SHUTDOWN);
	}
	expect("there it ends", event(&end, sizeof end), FI_SHUTDOWN);
	expect("that is the other", end.e.fid == &s->ep->fid, 1);
	failed("a message that will not come", s, FI_ECANCELED, in[1]);
	failed("nor one with a tag", s, FI_ECANCELED, in[0]);
	expect("another one", fi_recv(s->ep, in[1], 64, NULL, 0, NULL), -FI_EOPBADSTATE);
	expect("one with another tag", fi_trecv(s->ep, in[1], 64, NULL, 0, 5, 0, NULL),
	       -FI_EOPBADSTATE);
	must("fi_trecv", fi_trecv(s->ep, in[0], 64, NULL, 0, 6, 0, in));
	completion(s, c, &got);
	expect("what came before", got.op_context == in && !strcmp(in[0], "early"), 1);
	expect("it came once", fi_trecv(s->ep, in[1], 64, NULL, 0, 6, 0, NULL), -FI_EOPBADSTATE);
	expect("a send", fi_send(s->ep, in[0], 1, NULL, 0, NULL), -FI_EOPBADSTATE);
	expect("an inject", fi_tinject(s->ep, in[0], 1, 0, 5), -FI_EOPBADSTATE);
	expect("a write", fi_write(s->ep, in[0], 1, NULL, 0, 0, 1, NULL), -FI_EOPBADSTATE);
	expect("a read", fi_read(s->ep, in[0], 1, NULL, 0, 0, 1, NULL), -FI_EOPBADSTATE);
	if (!closes) {
		expect("here too", fi_send(c->ep, in[0], 1, NULL, 0, NULL), -FI_EOPBADSTATE);
		must("close", fi_close(&c->ep->fid));
	}
	must("close", fi_close(&s->ep->fid));
}

/* A buffer for several messages, posted before the end of the connection or, if `late`, after it,
 * takes what came and waits for no more. */
static void over_multi(struct side *c, struct side *s, int late)
{
	static char in[256];
	struct iovec iov = { in, sizeof in };
	struct fi_msg multi = { .msg_iov = &iov, .iov_count = 1, .context = in };
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	struct fi_cq_tagged_entry got = { 0 };
	struct fi_cq_err_entry e = { 0 };
	time_t until = time(NULL) + 5;

	join(c, s, 0);
	if (!late)
		must("fi_recvmsg", fi_recvmsg(s->ep, &multi, FI_MULTI_RECV));
	for (int i = 0; i < 2; i++) {
		must("fi_send", fi_send(c->ep, "several", 8, NULL, 0, NULL));
		completion(c, s, &got);
	}
	must("fi_shutdown", fi_shutdown(c->ep, 0));
	expect("here it ends", event(&end, sizeof end), FI_SHUTDOWN);
	expect("there it ends", event(&end, sizeof end), FI_SHUTDOWN);
	if (late)
		must("fi_recvmsg", fi_recvmsg(s->ep, &multi, FI_MULTI_RECV));
	for (int i = 0; i < 2; i++) {
		completion(s, c, &got);
		expect("one of several", got.op_context == in && got.buf == in + 8 * i, 1);
		expect("there may be more", !!(got.flags & FI_MULTI_RECV), 0);
	}
	while (fi_cq_read(s->cq, &got, 1) == -FI_EAGAIN && time(NULL) < until)
		;
	expect("the buffer comes back", fi_cq_readerr(s->cq, &e, 0), 1);
	expect("as no more will come", e.err, FI_ECANCELED);
	expect("it is the buffer", e.op_context == in && (e.flags & FI_MULTI_RECV), 1);
	expect("another one", fi_recvmsg(s->ep, &multi, FI_MULTI_RECV), -FI_EOPBADSTATE);
	must("close", fi_close(&c->ep->fid));
	must("close", fi_close(&s->ep->fid));
}

/* A request has one answer. */
static void answers(struct side *c, struct side *s)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } req;
	struct side other = *s;
	struct fi_info *seen;
	uint32_t number;

	for (int way = 0; way < 3; way++) {
		open_ep(c, info);
		must("fi_connect", fi_connect(c->ep, server, NULL, 0));
		expect("a look at it has all", fi_eq_sread(eq, &number, &req, sizeof req,
							   SECONDS * 1000, FI_PEEK),
		       sizeof req.e);
		seen = req.e.info;
		expect("also the information", seen && seen->handle, 1);
		expect("a look again", fi_eq_read(eq, &number, &req, sizeof req, FI_PEEK) > 0
			       && req.e.info == seen, 1);
		expect("a request to answer", event(&req, sizeof req), FI_CONNREQ);
		expect("it is what was seen", req.e.info == seen, 1);
		open_ep(s, req.e.info);
		open_ep(&other, req.e.info);
		if (way == 0)
			must("fi_accept", fi_accept(s->ep, NULL, 0));
		else if (way == 1)
			must("fi_reject", fi_reject(pep, req.e.info->handle, NULL, 0));
		else
			must("close", fi_close(req.e.info->handle));
		expect("a second answer", fi_accept(other.ep, NULL, 0), -FI_EBADF);
		expect("a third", fi_accept(other.ep, NULL, 0), -FI_EBADF);
		expect("a fourth", fi_reject(pep, req.e.info->handle, NULL, 0), -FI_EBADF);
		fi_freeinfo(req.e.info);
		if (way == 0) {
			expect("it stands", event(&req, sizeof req), FI_CONNECTED);
			expect("at both ends", event(&req, sizeof req), FI_CONNECTED);
		} else {
			struct fi_eq_err_entry err = { 0 };
			expect("it was refused", event(&req, sizeof req), -1);
			must("fi_eq_readerr", fi_eq_readerr(eq, &err, 0));
		}
		must("close", fi_close(&other.ep->fid));
		must("close", fi_close(&s->ep->fid));
		if (way == 0)
			expect("the one end hears", event(&req, sizeof req), FI_SHUTDOWN);
		must("close", fi_close(&c->ep->fid));
		expect("no other event", fi_eq_read(eq, &number, &req, sizeof req, 0), -FI_EAGAIN);
	}
}

/* An endpoint that is closed without an answer refuses the request that it was opened with. */
static void unanswered(struct side *c, struct side *s)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } req;
	struct fi_eq_err_entry err = { 0 };

	open_ep(c, info);
	must("fi_connect", fi_connect(c->ep, server, NULL, 0));
	expect("a request that gets no answer", event(&req, sizeof req), FI_CONNREQ);
	open_ep(s, req.e.info);
	must("close", fi_close(&s->ep->fid));
	expect("it is refused", event(&req.data, sizeof req.data), -1);
	must("fi_eq_readerr", fi_eq_readerr(eq, &err, 0));
	expect("to who asked", err.err == FI_ECONNREFUSED && err.fid == &c->ep->fid, 1);
	expect("that is an answer", fi_reject(pep, req.e.info->handle, NULL, 0), -FI_EBADF);
	fi_freeinfo(req.e.info);
	must("close", fi_close(&c->ep->fid));
}

/* What is watched, and whether it was freed. */
static void *watched;
static int freed;

extern void __libc_free(void *at);

/* Instead of the C library's. */
void free(void *at)
{
	freed += at && at == watched;
	__libc_free(at);
}

/* A listener that is closed refuses what nobody has read, and frees what was seen of it. With
 * `answered` the program has refused it before. */
static void unread(struct side *c, int answered)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	struct fid *handle;
	uint32_t number;

	open_ep(c, info);
	must("fi_connect", fi_connect(c->ep, server, NULL, 0));
	must("a look", fi_eq_sread(eq, &number, &end, sizeof end, SECONDS * 1000, FI_PEEK));
	watched = end.e.info;
	handle = end.e.info->handle;
	if (answered)
		must("fi_reject", fi_reject(pep, handle, NULL, 0));
	must("close", fi_close(&pep->fid));
	expect("what was seen is freed", freed, 1);
	expect("its handle is closed", fi_close(handle), -FI_EBADF);
	watched = NULL;
	freed = 0;
	expect("a listener that closes refuses", event(&end, sizeof end), -1);
	must("close", fi_close(&c->ep->fid));
}

/* An endpoint that is closed ends its connection, and a listener that is closed refuses. */
static void closing(struct side *c, struct side *s)
{
	struct fi_info *next = ask(FI_SOURCE, "127.0.0.1", "4713");
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	size_t len = sizeof server;
	uint32_t number;

	join(c, s, 0);
	must("close", fi_close(&s->ep->fid));
	expect("the other end hears of a close", event(&end, sizeof end), FI_SHUTDOWN);
	expect("it is the other end", end.e.fid == &c->ep->fid, 1);
	must("close", fi_close(&c->ep->fid));
	expect("nothing is left", fi_eq_read(eq, &number, &end, sizeof end, 0), -FI_EAGAIN);

	unread(c, 0);
	must("fi_passive_ep", fi_passive_ep(fabric, next, &pep, NULL));
	must("bind", fi_pep_bind(pep, &eq->fid, 0));
	must("fi_listen", fi_listen(pep));
	must("fi_getname", fi_getname(&pep->fid, server, &len));
	unread(c, 1);
	fi_freeinfo(next);
}

/* An alias has the connection of its endpoint, which ends with the last of both. */
static void aliases(struct side *c, struct side *s)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } end;
	struct side alias;
	char peer[64], name[64];
	size_t len = sizeof peer, name_len = sizeof name;
	uint32_t number;

	join(c, s, 0);
	alias = *c;
	must("fi_ep_alias", fi_ep_alias(c->ep, &alias.ep, FI_TRANSMIT | FI_DELIVERY_COMPLETE));
	expect("an alias is of its class", alias.ep->fid.fclass == FI_CLASS_EP
		       && alias.ep->fid.context == c->ep->fid.context, 1);
	expect("fi_getpeer of an alias", fi_getpeer(alias.ep, peer, &len), 0);
	must("fi_getname", fi_getname(&s->ep->fid, name, &name_len));
	expect("the same peer", len == name_len && !memcmp(peer, name, len), 1);
	message("by the alias", &alias, s, 64);
	must("close", fi_close(&c->ep->fid));
	message("by the alias alone", &alias, s, 64);
	message("to it", s, &alias, 64);
	expect("the connection stands", fi_eq_read(eq, &number, &end, sizeof end, 0), -FI_EAGAIN);
	must("close", fi_close(&alias.ep->fid));
	expect("it ends with the alias", event(&end, sizeof end), FI_SHUTDOWN);
	must("close", fi_close(&s->ep->fid));

	join(c, s, 0);
	must("fi_ep_alias", fi_ep_alias(c->ep, &alias.ep, FI_RECV));
	expect("fi_shutdown of an alias", fi_shutdown(alias.ep, 0), 0);
	for (int i = 0; i < 2; i++)
		expect("the connection is over", event(&end, sizeof end), FI_SHUTDOWN);
	must("close", fi_close(&alias.ep->fid));
	must("close", fi_close(&c->ep->fid));
	must("close", fi_close(&s->ep->fid));
}

/* A process that connects, says so, and does nothing more until it is killed. */
static void idle(int said)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct { struct fi_eq_cm_entry e; char data[256]; } got;
	struct side c;
	info = ask(0, "127.0.0.1", "14712");
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
	open_domain(&c, info);
	open_ep(&c, info);
	must("fi_connect", fi_connect(c.ep, info->dest_addr, NULL, 0));
	expect("connected", event(&got, sizeof got), FI_CONNECTED);
	must("write", write(said, "c", 1));
	for (;;)
		event(&got, sizeof got);
}

/* Nothing is on its way when the peer dies, and yet its end is told. */
static void death(pid_t child, int start, int said)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_info *here = ask(FI_SOURCE, "127.0.0.1", "14712");
	struct { struct fi_eq_cm_entry e; char data[256]; } got;
	struct side s;
	char c;
	must("fi_fabric", fi_fabric(here->fabric_attr, &fabric, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
	must("fi_passive_ep", fi_passive_ep(fabric, here, &pep, NULL));
	must("bind", fi_pep_bind(pep, &eq->fid, 0));
	must("fi_listen", fi_listen(pep));
	must("write", write(start, "s", 1));
	expect("a process asks", event(&got, sizeof got), FI_CONNREQ);
	open_domain(&s, got.e.info);
	open_ep(&s, got.e.info);
	must("fi_accept", fi_accept(s.ep, NULL, 0));
	fi_freeinfo(got.e.info);
	expect("connected", event(&got, sizeof got), FI_CONNECTED);
	expect("it is connected too", read(said, &c, 1), 1);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	expect("its death is told", event(&got, sizeof got), FI_SHUTDOWN);
	expect("of its connection", got.e.fid == &s.ep->fid, 1);
	expect("a queue that is bound stays open", fi_close(&eq->fid), -FI_EBUSY);
	must("close", fi_close(&s.ep->fid));
	must("close", fi_close(&s.cq->fid));
	expect("also for a listener alone", fi_close(&eq->fid), -FI_EBUSY);
	must("close", fi_close(&pep->fid));
	must("close", fi_close(&s.domain->fid));
	must("close", fi_close(&eq->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(here);
}

int main(void)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct side c, s;
	size_t len = sizeof server;
	struct fi_info *here;
	int start[2], said[2];
	char byte;
	pid_t child;

	/* Before libfabric knows of us, and so in a process that may use it. */
	setenv("FI_BAREWIRE_T_DEAD_MS", "3000", 1);
	if (pipe(start) || pipe(said) || (child = fork()) < 0)
		return 1;
	if (child == 0) {
		/* Whose loop nobody turns may be silent and alive. */
		setenv("FI_BAREWIRE_PROGRESS", "auto", 1);
		alarm(200);
		if (read(start[0], &byte, 1) == 1)
			idle(said[1]);
		return 1;
	}
	death(child, start[1], said[0]);

	here = ask(FI_SOURCE, "127.0.0.1", "14711");
	info = ask(0, "127.0.0.1", "14711");
	expect("the type comes back", info->ep_attr->type, FI_EP_MSG);
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
	must("fi_passive_ep", fi_passive_ep(fabric, here, &pep, NULL));
	expect("listen without a queue", fi_listen(pep), -FI_ENOEQ);
	must("bind", fi_pep_bind(pep, &eq->fid, 0));
	must("fi_listen", fi_listen(pep));
	must("fi_getname", fi_getname(&pep->fid, server, &len));
	expect("the listener's name is what was asked for",
	       len == info->dest_addrlen && !memcmp(server, info->dest_addr, len), 1);
	open_domain(&c, info);
	refusals(&c);
	for (int round = 0; round < 3; round++) {
		join(&c, &s, round == 0);
		message("one way", &c, &s, 64);
		message("the other", &s, &c, 1);
		message("a long one", &c, &s, LONG);
		part(&c, &s);
	}
	over(&c, &s, 0);
	over(&c, &s, 1);
	over_multi(&c, &s, 0);
	over_multi(&c, &s, 1);
	answers(&c, &s);
	unanswered(&c, &s);
	aliases(&c, &s);
	closing(&c, &s);
	must("close", fi_close(&c.cq->fid));
	must("close", fi_close(&s.cq->fid));
	must("close", fi_close(&c.domain->fid));
	must("close", fi_close(&s.domain->fid));
	must("close", fi_close(&eq->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(here);
	fi_freeinfo(info);
	/* The other side is read by the same thread, so it had not heard when the call returned. */
	expect("accepting waits for nobody", accepting < 0.4, 1);
	printf("ok end\n");
	return 0;
}
