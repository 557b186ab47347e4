/*
 * names serve|ask|none NODE SERVICE FORMAT: a server and a client that know each other by host and
 * service. "-" is none; FORMAT is native, in (FI_SOCKADDR_IN) or in6 (FI_SOCKADDR_IN6). `ask1` is a
 * client where the service that follows is nobody's. `bare` inserts a sockaddr of the program's own.
 * `none`: the name leads to nobody. One line for each check: "ok NAME" or "BAD NAME: got X, want Y".
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_tagged.h>

#include "check.h"

static struct fi_info *hints, *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
/* The longest is a `sockaddr_in6`. */
static unsigned char name[28];
static size_t name_len = 16;

static void open_all(void)
{
	struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
	size_t len = sizeof name;

	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	must("fi_getname", fi_getname(&ep->fid, name, &len));
	expect("length of a name", len, name_len);
}

static void close_all(void)
{
	must("close", fi_close(&ep->fid));
	must("close", fi_close(&cq->fid));
	must("close", fi_close(&av->fid));
	must("close", fi_close(&domain->fid));
	must("close", fi_close(&fabric->fid));
}

/* Waits for one completion. */
static void wait_one(const char *what)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e = { 0 };

	for (double end = now() + 20; now() < end;) {
		ssize_t n = fi_cq_read(cq, &entry, 1);
		if (n == 1)
			return;
		if (n == -FI_EAVAIL) {
			must("fi_cq_readerr", fi_cq_readerr(cq, &e, 0));
			must(what, -e.err);
		}
	}
	must(what, -FI_ETIMEDOUT);
}

static void say(const void *what, fi_addr_t to)
{
	ssize_t ret;

	while ((ret = fi_send(ep, what, name_len, NULL, to, NULL)) == -FI_EAGAIN)
		fi_cq_read(cq, NULL, 0);
	must("fi_send", ret);
}

/* A `sockaddr_in` as text; with a zero tail it is that and no more. */
static void print_name(const char *what, const void *at)
{
	const struct sockaddr_in *in = at;
	const struct sockaddr_in6 *in6 = at;
	static const char zero[8];
	char text[64];

	if (in->sin_family == AF_INET6) {
		inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof text);
		printf("%s [%s]:%d\n", what, text, ntohs(in6->sin6_port));
		fflush(stdout);
		return;
	}
	inet_ntop(AF_INET, &in->sin_addr, text, sizeof text);
	printf("%s %s:%d%s\n", what, text, ntohs(in->sin_port),
	       memcmp(in->sin_zero, zero, sizeof zero) ? " and more" : "");
	fflush(stdout);
}

static void serve(int in)
{
	unsigned char peer[28];
	fi_addr_t to;

	if (in)
		print_name("source", info->src_addr);
	open_all();
	must("fi_recv", fi_recv(ep, peer, sizeof peer, NULL, FI_ADDR_UNSPEC, NULL));
	if (in)
		print_name("name", name);
	printf("up\n");
	fflush(stdout);
	wait_one("the client's message");
	expect("fi_av_insert", fi_av_insert(av, peer, 1, &to, 0, NULL), 1);
	say(name, to);
	wait_one("the answer");
}

/* What an address vector has at `at`. */
static void has(const char *what, fi_addr_t at, const void *want)
{
	unsigned char got[28];
	size_t len = sizeof got;

	must("fi_av_lookup", fi_av_lookup(av, at, got, &len));
	expect(what, memcmp(got, want, name_len), 0);
}

/* A program's own sockaddr for the server. */
static void *bare(const char *node, const char *service, int in6)
{
	static struct sockaddr_in v4 = { .sin_family = AF_INET };
	static struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };

	v4.sin_port = v6.sin6_port = htons(atoi(service));
	expect("a number", inet_pton(in6 ? AF_INET6 : AF_INET, node,
				     in6 ? (void *)&v6.sin6_addr : &v4.sin_addr), 1);
	return in6 ? (void *)&v6 : &v4;
}

static void ask(const char *node, const char *service, int in, int count, void *own)
{
	unsigned char reply[28];
	fi_addr_t to, same, all[4];

	if (in)
		print_name("destination", info->dest_addr);
	open_all();
	if (in)
		print_name("name", name);
	expect("fi_av_insert", fi_av_insert(av, own ? own : info->dest_addr, 1, &to, 0, NULL), 1);
	if (own)
		has("the address as the program wrote it", to, own);
	expect("fi_av_insertsvc", fi_av_insertsvc(av, node, service, &same, 0, NULL), 1);
	has("insertsvc is the destination", same, info->dest_addr);
	expect("fi_av_insertsym", fi_av_insertsym(av, node, 1, service, count, all, 0, NULL), count);
	has("insertsym begins with it", all[0], info->dest_addr);
	expect("nobody", fi_av_insertsvc(av, "no-host.invalid", service, &same, 0, NULL), -FI_ENODATA);
	expect("nobody's number", same == FI_ADDR_NOTAVAIL, 1);
	must("fi_recv", fi_recv(ep, reply, sizeof reply, NULL, FI_ADDR_UNSPEC, NULL));
	say(name, to);
	wait_one("the message");
	wait_one("the server's answer");
}

int main(int argc, char **argv)
{
	const char *node = strcmp(argv[2], "-") ? argv[2] : NULL;
	const char *service = strcmp(argv[3], "-") ? argv[3] : NULL;
	int in = !strncmp(argv[4], "in", 2), serves = !strcmp(argv[1], "serve");
	int in6 = !strcmp(argv[4], "in6"), is_bare = !strcmp(argv[1], "bare");
	int count = !strcmp(argv[1], "ask") ? 2 : 1;
	double begun;
	int ret;

	hints = fi_allocinfo();
	hints->caps = FI_MSG;
	hints->ep_attr->type = FI_EP_RDM;
	if (in)
		hints->addr_format = in6 ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
	name_len = in6 ? 28 : 16;
	/* The first call of a process loads every provider. */
	if (!strcmp(argv[1], "none") && !fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &info))
		fi_freeinfo(info);
	begun = now();
	ret = fi_getinfo(FI_VERSION(1, 17), node, service, serves ? FI_SOURCE : 0, hints, &info);
	if (!strcmp(argv[1], "none")) {
		expect("nobody", ret, -FI_ENODATA);
		printf("told after %.0f ms\n", (now() - begun) * 1e3);
	} else {
		must("fi_getinfo", ret);
		expect("the format asked for", !in || info->addr_format == hints->addr_format, 1);
		if (serves)
			serve(in);
		else
			ask(node, service, in, count, is_bare ? bare(node, service, in6) : NULL);
		close_all();
		fi_freeinfo(info);
	}
	fi_freeinfo(hints);
	printf(bad ? "BAD end\n" : "ok end\n");
	return bad != 0;
}
