/*
 * stream PROVIDER LEN WINDOW COUNT server|client HOST PORT [wait]
 *
 * The client sends the server COUNT tagged messages of LEN bytes, WINDOW of them in flight, over a
 * provider of libfabric, or through a TCP socket if PROVIDER is `kernel`. Both polls spin, or sleep
 * with `wait`. A TCP connection to HOST:PORT carries the addresses. Each prints one line:
 *
 *     seconds processor-seconds
 *
 * from the first message after the warm-up until the server's answer that it has all of them.
 * `stream version` prints the version of the libfabric that it runs with.
 */
#define _GNU_SOURCE
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

enum { DATA = 1, ANSWER = 2, NAME_MAX_LEN = 256, BATCH = 16, REGION_KEY = 5 };

struct end {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	struct fid_mr *mr;
	fi_addr_t peer;
	char *buf;
	size_t len;
	long window;
	int sleeps;
};

static void must(const char *what, long ret)
{
	if (ret < 0) {
		fprintf(stderr, "%s: %s\n", what, fi_strerror((int) -ret));
		exit(1);
	}
}

static void need(const char *what, int holds)
{
	if (!holds) {
		perror(what);
		exit(1);
	}
}

/* The connection that carries addresses, and the messages of `kernel`. */
static int meet(int is_server, const char *host, const char *port)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found;
	int one = 1, fd = -1;

	need("getaddrinfo", getaddrinfo(host, port, &hints, &found) == 0);
	if (is_server) {
		int door = socket(AF_INET, SOCK_STREAM, 0);
		setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		need("bind", bind(door, found->ai_addr, found->ai_addrlen) == 0);
		need("listen", listen(door, 1) == 0);
		fd = accept(door, NULL, NULL);
		close(door);
	} else {
		/* The server may not listen yet: ten seconds. */
		for (int tries = 0; fd < 0 && tries < 500; tries++) {
			int to = socket(AF_INET, SOCK_STREAM, 0);
			if (connect(to, found->ai_addr, found->ai_addrlen) == 0) {
				fd = to;
			} else {
				close(to);
				usleep(20000);
			}
		}
	}
	need("connect", fd >= 0);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	freeaddrinfo(found);
	return fd;
}

static void put_all(int fd, const void *from, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = write(fd, (const char *) from + done, len - done);
		need("write", n > 0);
		done += (size_t) n;
	}
}

static void get_all(int fd, void *to, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = read(fd, (char *) to + done, len - done);
		need("read", n > 0);
		done += (size_t) n;
	}
}

static void open_end(struct end *e, const char *provider, const char *source)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	struct fid_fabric *fabric;
	struct fi_cq_attr cq = {
		.format = FI_CQ_FORMAT_TAGGED,
		.size = 1024,
		.wait_obj = e->sleeps ? FI_WAIT_UNSPEC : FI_WAIT_NONE,
	};
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	int is_ours = strcmp(provider, "barewire") == 0;

	hints->caps = FI_TAGGED;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->fabric_attr->prov_name = strdup(provider);
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), is_ours ? NULL : source, NULL,
				      is_ours ? 0 : FI_SOURCE, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &e->domain, NULL));
	must("fi_cq_open", fi_cq_open(e->domain, &cq, &e->cq, NULL));
	must("fi_av_open", fi_av_open(e->domain, &av, &e->av, NULL));
	must("fi_endpoint", fi_endpoint(e->domain, info, &e->ep, NULL));
	must("bind", fi_ep_bind(e->ep, &e->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(e->ep, &e->av->fid, 0));
	must("fi_enable", fi_enable(e->ep));
	if (info->domain_attr->mr_mode & FI_MR_LOCAL)
		must("fi_mr_reg", fi_mr_reg(e->domain, e->buf, e->len * (size_t) e->window,
					    FI_SEND | FI_RECV, 0, REGION_KEY, 0, &e->mr, NULL));
}

static void swap_names(struct end *e, int fd)
{
	char own[NAME_MAX_LEN] = "", other[NAME_MAX_LEN];
	size_t len = sizeof own;

	must("fi_getname", fi_getname(&e->ep->fid, own, &len));
	put_all(fd, own, sizeof own);
	get_all(fd, other, sizeof other);
	must("fi_av_insert", fi_av_insert(e->av, other, 1, &e->peer, 0, NULL) - 1);
}

static long take(struct end *e)
{
	struct fi_cq_tagged_entry entries[BATCH];
	struct fi_cq_err_entry error = { 0 };
	ssize_t n = e->sleeps ? fi_cq_sread(e->cq, entries, BATCH, NULL, 1000)
			      : fi_cq_read(e->cq, entries, BATCH);

	if (n == -FI_EAVAIL && fi_cq_readerr(e->cq, &error, 0) == 1)
		must("completion", -error.err);
	if (n == -FI_EAGAIN)
		return 0;
	must("fi_cq_read", n);
	return n;
}

/* Posts until the provider has taken it. Returns the completions that were read meanwhile. */
static long post(struct end *e, int sends, long i, size_t len, uint64_t tag)
{
	static struct fi_context2 contexts[4096];
	struct fi_context2 *context = &contexts[i % e->window];
	char *at = e->buf + (size_t) (i % e->window) * e->len;
	void *desc = e->mr ? fi_mr_desc(e->mr) : NULL;
	long done = 0;

	for (;;) {
		ssize_t ret = sends ? fi_tsend(e->ep, at, len, desc, e->peer, tag, context)
				    : fi_trecv(e->ep, at, len, desc, FI_ADDR_UNSPEC, tag, 0, context);
		if (ret == 0)
			return done;
		if (ret != -FI_EAGAIN)
			must("post", ret);
		done += take(e);
	}
}

/* COUNT messages one way, and an answer back. */
static void stream(struct end *e, int is_server, long count)
{
	long posted = 0, done = 0;

	while (done < count) {
		while (posted < count && posted - done < e->window)
			done += post(e, !is_server, posted++, e->len, DATA);
		done += take(e);
	}
	for (done = post(e, is_server, 0, 1, ANSWER); done < 1;)
		done += take(e);
}

static void through_socket(int fd, int is_server, char *buf, size_t len, long count)
{
	char answer = 0;

	for (long i = 0; i < count; i++)
		is_server ? get_all(fd, buf, len) : put_all(fd, buf, len);
	is_server ? put_all(fd, &answer, 1) : get_all(fd, &answer, 1);
}

static double processor_seconds(void)
{
	struct rusage used;

	getrusage(RUSAGE_SELF, &used);
	return (double) (used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
	       1e-6 * (double) (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

int main(int argc, char **argv)
{
	struct end e = { 0 };

	if (argc == 2 && strcmp(argv[1], "version") == 0) {
		puts(fi_tostr("", FI_TYPE_VERSION));
		return 0;
	}
	if (argc < 8)
		return 2;
	int is_kernel = strcmp(argv[1], "kernel") == 0, is_server = strcmp(argv[5], "server") == 0;
	long count = atol(argv[4]), warm_up = count / 8 + 1;
	e.len = (size_t) atol(argv[2]);
	e.window = atol(argv[3]);
	e.sleeps = argc > 8;
	if (e.len < 1 || e.window < 1 || e.window > 4096)
		return 2;
	e.buf = aligned_alloc(4096, (e.len * (size_t) e.window + 4095) / 4096 * 4096);
	memset(e.buf, 7, e.len * (size_t) e.window);
	int fd = meet(is_server, argv[6], argv[7]);
	if (!is_kernel) {
		char own[NI_MAXHOST];
		struct sockaddr_in at;
		socklen_t len = sizeof at;
		getsockname(fd, (struct sockaddr *) &at, &len);
		getnameinfo((struct sockaddr *) &at, len, own, sizeof own, NULL, 0, NI_NUMERICHOST);
		open_end(&e, argv[1], own);
		swap_names(&e, fd);
	}
	double began = 0, used = 0;
	for (int measured = 0; measured < 2; measured++) {
		began = now(), used = processor_seconds();
		if (is_kernel)
			through_socket(fd, is_server, e.buf, e.len, measured ? count : warm_up);
		else
			stream(&e, is_server, measured ? count : warm_up);
	}
	printf("%.9f %.6f\n", now() - began, processor_seconds() - used);
	fflush(stdout);
	/* The other one may still wait for what this one's closing takes back. */
	char last = 0;
	put_all(fd, &last, 1);
	get_all(fd, &last, 1);
	return 0;
}
