/*
 * life CASE: lives of a process that libfabric's manuals do not tell of. Ends with "CASE survived".
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

static int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *,
		      struct fi_info **);
static int (*open_fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
static struct fi_info *(*dupinfo)(const struct fi_info *);
static void (*freeinfo)(struct fi_info *);

static void must(const char *what, long ret)
{
	if (ret < 0) {
		printf("%s: %ld\n", what, ret);
		exit(1);
	}
}

/* libfabric is opened by hand, as Python and some MPI libraries do. */
static void *load(void)
{
	void *lib = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		printf("%s\n", dlerror());
		exit(1);
	}
	getinfo = dlsym(lib, "fi_getinfo");
	open_fabric = dlsym(lib, "fi_fabric");
	dupinfo = dlsym(lib, "fi_dupinfo");
	freeinfo = dlsym(lib, "fi_freeinfo");
	return lib;
}

struct end {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t self;
};

static struct fi_info *ask(int progress, int threading)
{
	struct fi_info *hints = dupinfo(NULL), *info = NULL;
	hints->caps = FI_TAGGED | FI_RMA;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->threading = threading;
	hints->domain_attr->data_progress = progress;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	freeinfo(hints);
	return info;
}

static void open_domain(struct end *e, struct fi_info *info)
{
	must("fi_fabric", open_fabric(info->fabric_attr, &e->fabric, NULL));
	must("fi_domain", fi_domain(e->fabric, info, &e->domain, NULL));
}

static void open_ep(struct end *e, struct fi_info *info)
{
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	char name[64];
	size_t len = sizeof name;

	must("fi_cq_open", fi_cq_open(e->domain, &cq, &e->cq, NULL));
	must("fi_av_open", fi_av_open(e->domain, &av, &e->av, NULL));
	must("fi_endpoint", fi_endpoint(e->domain, info, &e->ep, NULL));
	must("bind", fi_ep_bind(e->ep, &e->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(e->ep, &e->av->fid, 0));
	must("fi_enable", fi_enable(e->ep));
	must("fi_getname", fi_getname(&e->ep->fid, name, &len));
	must("fi_av_insert", fi_av_insert(e->av, name, 1, &e->self, 0, NULL) - 1);
}

static void close_ep(struct end *e)
{
	must("close", fi_close(&e->ep->fid));
	must("close", fi_close(&e->cq->fid));
	must("close", fi_close(&e->av->fid));
}

static void close_domain(struct end *e)
{
	must("close", fi_close(&e->domain->fid));
	must("close", fi_close(&e->fabric->fid));
}

/* `count` messages of an endpoint to itself. */
static void talk(struct end *e, long count)
{
	for (long i = 0; i < count; i++) {
		struct fi_cq_tagged_entry entry;
		long in = -1, out = i;
		int to_come = 2;
		must("fi_trecv", fi_trecv(e->ep, &in, 8, NULL, FI_ADDR_UNSPEC, i, 0, &in));
		while (fi_tsend(e->ep, &out, 8, NULL, e->self, i, &out) == -FI_EAGAIN)
			sched_yield();
		while (to_come > 0) {
			ssize_t n = fi_cq_read(e->cq, &entry, 1);
			if (n == -FI_EAGAIN)
				sched_yield();
			else
				must("fi_cq_read", n);
			if (n == 1)
				to_come--;
		}
		if (in != i) {
			printf("message %ld holds %ld\n", i, in);
			exit(1);
		}
	}
}

static struct fi_info *info;
static struct end shared;

static void *worker(void *arg)
{
	struct end mine = shared;
	for (int round = 0; round < 5; round++) {
		open_ep(&mine, info);
		talk(&mine, 2000);
		close_ep(&mine);
	}
	return arg;
}

/* Threads with endpoints of their own in one domain, which come and go. */
static void threads(void)
{
	pthread_t all[4];
	open_domain(&shared, info);
	for (int i = 0; i < 4; i++)
		pthread_create(&all[i], NULL, worker, NULL);
	for (int i = 0; i < 4; i++)
		pthread_join(all[i], NULL);
	close_domain(&shared);
}

static void *reader(void *arg)
{
	struct fi_cq_tagged_entry entry;
	long *left = arg;
	while (__atomic_load_n(left, __ATOMIC_ACQUIRE) > 0) {
		if (fi_cq_read(shared.cq, &entry, 1) == 1)
			__atomic_sub_fetch(left, 1, __ATOMIC_RELEASE);
		else
			sched_yield();
	}
	return NULL;
}

/* Threads that post to one endpoint while others read its one queue. */
static void one_queue(void)
{
	enum { COUNT = 20000 };
	static long left = 2 * COUNT, in[64];
	pthread_t readers[2];
	open_domain(&shared, info);
	open_ep(&shared, info);
	for (int i = 0; i < 2; i++)
		pthread_create(&readers[i], NULL, reader, &left);
	for (long i = 0; i < COUNT; i++) {
		ssize_t ret;
		while ((ret = fi_trecv(shared.ep, &in[i % 64], 8, NULL, FI_ADDR_UNSPEC, 1, 0,
				       NULL)) == -FI_EAGAIN)
			sched_yield();
		must("fi_trecv", ret);
		while ((ret = fi_tsend(shared.ep, &i, 8, NULL, shared.self, 1, NULL)) == -FI_EAGAIN)
			sched_yield();
		must("fi_tsend", ret);
		/* `i` is on this stack: it stays until the message has left. */
		while (__atomic_load_n(&left, __ATOMIC_ACQUIRE) > 2 * (COUNT - i - 1))
			sched_yield();
	}
	for (int i = 0; i < 2; i++)
		pthread_join(readers[i], NULL);
	close_ep(&shared);
	close_domain(&shared);
}

static long controllers;

/* Control calls, which any thread may make, whatever the threading level. */
static void *controller(void *arg)
{
	static char memory[2][4096];
	struct end mine = shared;
	for (int round = 0; round < 300; round++) {
		struct fid_mr *mr;
		char name[64];
		size_t len = sizeof name;
		fi_addr_t addr;
		must("fi_mr_reg", fi_mr_reg(mine.domain, memory[(long) arg], 4096, FI_REMOTE_WRITE, 0,
					    (long) arg + 1, 0, &mr, NULL));
		open_ep(&mine, info);
		must("fi_getname", fi_getname(&mine.ep->fid, name, &len));
		must("fi_av_insert", fi_av_insert(shared.av, name, 1, &addr, 0, NULL) - 1);
		must("fi_av_remove", fi_av_remove(shared.av, &addr, 1, 0));
		close_ep(&mine);
		must("close", fi_close(&mr->fid));
	}
	__atomic_sub_fetch(&controllers, 1, __ATOMIC_RELEASE);
	return NULL;
}

/* FI_THREAD_DOMAIN: one thread transfers, while others make control calls. */
static void control(void)
{
	pthread_t all[2];
	open_domain(&shared, info);
	open_ep(&shared, info);
	controllers = 2;
	for (long i = 0; i < 2; i++)
		pthread_create(&all[i], NULL, controller, (void *) i);
	while (__atomic_load_n(&controllers, __ATOMIC_ACQUIRE) > 0)
		talk(&shared, 100);
	for (int i = 0; i < 2; i++)
		pthread_join(all[i], NULL);
	close_ep(&shared);
	close_domain(&shared);
}

int main(int argc, char **argv)
{
	const char *which = argc > 1 ? argv[1] : "";
	void *lib = load();

	int progress = strstr(which, "auto") ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
	int threading = strstr(which, "control") ? FI_THREAD_DOMAIN : FI_THREAD_SAFE;
	info = ask(progress, threading);
	if (!strncmp(which, "threads", 7)) {
		threads();
	} else if (!strncmp(which, "queue", 5)) {
		one_queue();
	} else if (!strncmp(which, "control", 7)) {
		control();
	} else if (!strncmp(which, "dlclose", 7)) {
		/* The domain is open and its thread runs while the library goes. */
		open_domain(&shared, info);
		open_ep(&shared, info);
		talk(&shared, 100);
		dlclose(lib);
		usleep(100000);
	} else if (!strncmp(which, "exit", 4)) {
		open_domain(&shared, info);
		open_ep(&shared, info);
		talk(&shared, 100);
	} else if (!strncmp(which, "fork", 4)) {
		/* A child that ends in its own way leaves the parent's domain alone. */
		int status = -1;
		open_domain(&shared, info);
		open_ep(&shared, info);
		talk(&shared, 100);
		if (fork() == 0) {
			close_ep(&shared);
			exit(0);
		}
		wait(&status);
		must("child", -status);
		talk(&shared, 100);
		close_ep(&shared);
		close_domain(&shared);
	} else if (!strncmp(which, "reload", 6)) {
		for (int i = 0; i < 20; i++) {
			open_domain(&shared, info);
			open_ep(&shared, info);
			talk(&shared, 10);
			close_ep(&shared);
			close_domain(&shared);
			freeinfo(info);
			dlclose(lib);
			lib = load();
			info = ask(FI_PROGRESS_AUTO, threading);
		}
	} else {
		return 2;
	}
	printf("%s survived\n", which);
	fflush(stdout);
	return 0;
}
