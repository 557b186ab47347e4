/*
 * A server that is killed and started again under its name: who was connected connects again, and
 * the first call does. One that is killed with a request it has not answered, and one that is killed
 * while its connection is idle: the other side is told. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_eq.h>

#include "check.h"

enum { ROUNDS = 6, PATIENCE = 30, LEN = 8 };

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *eq;
static struct fid_cq *cq;
static char in[LEN], out[LEN] = "message";
/* What came with the last event. */
static char param[256];

static struct fi_info *ask(uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo(), *found;

	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_MSG;
	hints->addr_format = FI_SOCKADDR_IN;
	must("fi_getinfo", fi_getinfo(fi_version(), "127.0.0.1", "14721", flags, hints, &found));
	fi_freeinfo(hints);
	return found;
}

static void open_fabric(struct fi_info *info)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_eq_open", fi_eq_open(fabric, &attr, &eq, NULL));
}

static void open_domain(struct fi_info *info)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .size = 64 };

	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &attr, &cq, NULL));
}

static struct fid_ep *open_ep(struct fi_info *info)
{
	struct fid_ep *ep;

	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &eq->fid, 0));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("fi_enable", fi_enable(ep));
	return ep;
}

/* The next event of an endpoint, or of any; what ends with an earlier server is passed over. */
static long event(struct fid_ep *ep, struct fi_eq_cm_entry *e)
{
	struct { struct fi_eq_cm_entry e; char data[256]; } got;
	struct fi_eq_err_entry err = { 0 };
	struct fi_cq_msg_entry done;
	double end = now() + PATIENCE;
	uint32_t event;

	while (now() < end) {
		long n = fi_eq_read(eq, &event, &got, sizeof got, 0);

		if (cq)
			fi_cq_read(cq, &done, 1);
		if (n == -FI_EAVAIL) {
			fi_eq_readerr(eq, &err, 0);
			return -err.err;
		}
		if (n > 0 && (!ep || got.e.fid == &ep->fid)) {
			*e = got.e;
			memcpy(param, got.data, sizeof param);
			return event;
		}
	}
	return -FI_ETIMEDOUT;
}

/* Takes connections, each with a receive posted, until it is killed. */
static int serve(void)
{
	struct fi_info *info = ask(FI_SOURCE);
	struct fi_eq_cm_entry e;
	struct fid_pep *pep;
	struct fid_ep *ep;

	open_fabric(info);
	must("fi_passive_ep", fi_passive_ep(fabric, info, &pep, NULL));
	must("bind", fi_pep_bind(pep, &eq->fid, 0));
	must("fi_listen", fi_listen(pep));
	must("write", write(STDOUT_FILENO, "l", 1));
	for (;;) {
		if (event(NULL, &e) != FI_CONNREQ || !strcmp(param, "do not answer"))
			continue;
		if (!domain)
			open_domain(e.info);
		ep = open_ep(e.info);
		must("fi_recv", fi_recv(ep, in, LEN, NULL, 0, NULL));
		must("fi_accept", fi_accept(ep, NULL, 0));
		fi_freeinfo(e.info);
	}
}

/* Starts a server, which listens when this returns. */
static pid_t start(void)
{
	int said[2];
	pid_t child;
	char byte;

	must("pipe", pipe(said));
	child = fork();
	must("fork", child);
	if (child == 0) {
		dup2(said[1], STDOUT_FILENO);
		close(said[0]);
		alarm(200);
		execl("/proc/self/exe", "reconnect", "serve", NULL);
		_exit(1);
	}
	close(said[1]);
	expect("a server listens", read(said[0], &byte, 1), 1);
	close(said[0]);
	return child;
}

static void send_one(struct fid_ep *ep)
{
	struct fi_cq_err_entry err = { 0 };
	double end = now() + PATIENCE;
	struct fi_cq_msg_entry done;
	long n;

	must("fi_send", fi_send(ep, out, LEN, NULL, 0, ep));
	do {
		n = fi_cq_read(cq, &done, 1);
		if (n == -FI_EAVAIL)
			n = fi_cq_readerr(cq, &err, 0) > 0 ? -err.err : n;
	} while ((n == -FI_EAGAIN || (n == 1 && done.op_context != ep)) && now() < end);
	expect("a message is delivered", n, 1);
}

/* The server is killed, and the endpoint's next event is as it should be. */
static void killed(pid_t server, struct fid_ep *ep, const char *name, long want)
{
	struct fi_eq_cm_entry e;

	kill(server, SIGKILL);
	waitpid(server, NULL, 0);
	expect(name, event(ep, &e), want);
	must("close", fi_close(&ep->fid));
}

/* Whoever waits for a server that dies is told. */
static void mourn(pid_t server, struct fi_info *info)
{
	static const char ask[] = "do not answer";
	struct fid_ep *ep = open_ep(info);
	struct fi_eq_cm_entry e;
	struct fi_cq_msg_entry done;

	must("fi_connect", fi_connect(ep, info->dest_addr, NULL, 0));
	expect("connected", event(ep, &e), FI_CONNECTED);
	killed(server, ep, "an idle connection ends", FI_SHUTDOWN);
	server = start();
	ep = open_ep(info);
	must("fi_connect", fi_connect(ep, info->dest_addr, ask, sizeof ask));
	/* The request arrives, and that it was heard comes back. */
	for (double end = now() + 1; now() < end;)
		fi_cq_read(cq, &done, 1);
	killed(server, ep, "a request ends", -FI_ECONNREFUSED);
}

int main(int argc, char **argv)
{
	struct fid_ep *ep[ROUNDS];
	struct fi_eq_cm_entry e;
	struct fi_info *info;
	pid_t server;

	(void) argv;
	if (argc > 1)
		return serve();
	server = start();
	info = ask(0);
	open_fabric(info);
	open_domain(info);
	for (int i = 0; i < ROUNDS; i++) {
		ep[i] = open_ep(info);
		must("fi_connect", fi_connect(ep[i], info->dest_addr, NULL, 0));
		expect("connected", event(ep[i], &e), FI_CONNECTED);
		send_one(ep[i]);
		/* Every other one stays open over the death of its server. */
		if (i % 2) {
			must("close", fi_close(&ep[i]->fid));
			ep[i] = NULL;
		}
		kill(server, SIGKILL);
		waitpid(server, NULL, 0);
		server = start();
	}
	for (int i = 0; i < ROUNDS; i++)
		if (ep[i])
			must("close", fi_close(&ep[i]->fid));
	mourn(server, info);
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&eq->fid));
	must("close", fi_close(&fabric->fid));
	fi_freeinfo(info);
	printf("ok end\n");
	return bad != 0;
}
