/*
 * rekey DIR: the key changes under endpoints that talk all the time, none of which is closed. The
 * domains read DIR/job.key, DIR/next.key and DIR/old.key (FI_BAREWIRE_KEY_FILE).
 */
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include "check.h"

#define NODES 10
#define RECVS 32
#define WORDS 128 /* of a message: more than one that is injected */
#define KEY_FLAG (1ULL << 57)
#define FILES (SIZE_MAX - 1) /* a domain with the key files */

/* What 1.20 appended to the table of address vectors. */
struct ops_av {
	size_t size;
	void *before[7];
	int (*insert_auth_key)(struct fid_av *av, const void *key, size_t len, fi_addr_t *fi_addr,
			       uint64_t flags);
};

/* One way from a node to another: the numbers of the last message and of the last write. */
struct way {
	fi_addr_t to;
	int used, sends, writes;
	uint64_t out[WORDS], word, sent, came, written;
	double begun[2]; /* of the message and the write that are under way */
};

struct node {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	struct fid_mr *mr;
	unsigned char name[16];
	uint64_t in[RECVS][WORDS], slots[NODES]; /* a slot for the writes of each node */
	struct way ways[NODES];
};

static struct node nodes[NODES];
static int count;
static const char *dir;
static double clock_, longest; /* time in which this process ran */
static long arrived, wrong, failed;

static struct fi_info *ask(unsigned char byte, size_t len)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;

	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_DIRECTED_RECV | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("barewire");
	hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
	if (len == SIZE_MAX) {
		hints->domain_attr->auth_key_size = len;
	} else if (len != FILES) {
		hints->domain_attr->auth_key = malloc(len);
		memset(hints->domain_attr->auth_key, byte, len);
		hints->domain_attr->auth_key_size = len;
	}
	must("fi_getinfo", fi_getinfo(fi_version(), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static void receive(struct node *n, int at)
{
	must("fi_trecv", fi_trecv(n->ep, n->in[at], sizeof n->in[at], NULL, FI_ADDR_UNSPEC, 7, 0,
				  n->in[at]));
}

/* Opens the next node. */
static struct node *open_node(unsigned char byte, size_t len)
{
	struct node *n = &nodes[count++];
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .size = 4096 };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	size_t name_len = sizeof n->name;

	n->info = ask(byte, len);
	must("fi_fabric", fi_fabric(n->info->fabric_attr, &n->fabric, NULL));
	must("fi_domain", fi_domain(n->fabric, n->info, &n->domain, NULL));
	must("fi_cq_open", fi_cq_open(n->domain, &cq, &n->cq, NULL));
	must("fi_av_open", fi_av_open(n->domain, &av, &n->av, NULL));
	must("fi_endpoint", fi_endpoint(n->domain, n->info, &n->ep, NULL));
	must("bind", fi_ep_bind(n->ep, &n->cq->fid, FI_TRANSMIT | FI_RECV));
	must("bind", fi_ep_bind(n->ep, &n->av->fid, 0));
	must("fi_enable", fi_enable(n->ep));
	must("fi_mr_reg", fi_mr_reg(n->domain, n->slots, sizeof n->slots, FI_REMOTE_WRITE, 0, 1, 0,
				    &n->mr, NULL));
	must("fi_getname", fi_getname(&n->ep->fid, n->name, &name_len));
	for (int i = 0; i < RECVS; i++)
		receive(n, i);
	return n;
}

static void close_all(void)
{
	for (struct node *n = nodes; n < nodes + count; n++) {
		must("close", fi_close(&n->ep->fid));
		must("close", fi_close(&n->mr->fid));
		must("close", fi_close(&n->cq->fid));
		must("close", fi_close(&n->av->fid));
		must("close", fi_close(&n->domain->fid));
		must("close", fi_close(&n->fabric->fid));
		fi_freeinfo(n->info);
	}
	memset(nodes, 0, sizeof nodes);
	count = 0;
}

/* `a` sends to `b` from now on, under this handle of a key where it has some. */
static void reaches(struct node *a, struct node *b, fi_addr_t key)
{
	struct way *way = &a->ways[b - nodes];

	way->to = key;
	must("fi_av_insert", fi_av_insert(a->av, b->name, 1, &way->to,
					  key == FI_ADDR_UNSPEC ? 0 : KEY_FLAG, NULL) - 1);
	way->used = 1;
}

/* A node that talks with all. */
static void join(struct node *n)
{
	for (struct node *other = nodes; other < n; other++) {
		reaches(n, other, FI_ADDR_UNSPEC);
		reaches(other, n, FI_ADDR_UNSPEC);
	}
}

static void post(struct node *a, struct node *b)
{
	struct way *way = &a->ways[b - nodes];
	struct fi_msg_rma write;
	struct fi_rma_iov there = { 8 * (a - nodes), 8, 1 };
	struct iovec here = { &way->word, 8 };

	if (!way->used)
		return;
	if (!way->sends) {
		way->sent++;
		for (int i = 0; i < WORDS; i++)
			way->out[i] = way->sent * WORDS + i;
		way->out[0] = (uint64_t) (a - nodes) << 32 | way->sent;
		/* The completion of a message is an odd context. */
		must("fi_tsend", fi_tsend(a->ep, way->out, sizeof way->out, NULL, way->to, 7,
					  (char *) way + 1));
		way->sends = 1;
		way->begun[0] = clock_;
	}
	if (!way->writes) {
		way->word = ++way->written;
		write = (struct fi_msg_rma) { .msg_iov = &here, .iov_count = 1, .addr = way->to,
			.rma_iov = &there, .rma_iov_count = 1, .context = way };
		must("fi_writemsg", fi_writemsg(a->ep, &write, FI_COMPLETION | FI_DELIVERY_COMPLETE));
		way->writes = 1;
		way->begun[1] = clock_;
	}
}

static void ended(double begun)
{
	if (clock_ - begun > longest)
		longest = clock_ - begun;
}

static void came(struct node *n, uint64_t *in)
{
	struct way *way = &nodes[in[0] >> 32].ways[n - nodes];
	uint64_t number = in[0] & UINT32_MAX;

	arrived++;
	wrong += number != ++way->came;
	for (int i = 1; i < WORDS; i++)
		wrong += in[i] != number * WORDS + i;
	receive(n, (in - n->in[0]) / WORDS);
}

/* The error of an operation of `n`, or 0. */
static int progress(struct node *n)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry e = { 0 };
	ssize_t got = fi_cq_read(n->cq, &entry, 1);
	struct way *way;

	if (got == -FI_EAVAIL) {
		must("fi_cq_readerr", fi_cq_readerr(n->cq, &e, 0));
		return e.err;
	}
	if (got != 1)
		return 0;
	if (entry.flags & FI_RECV) {
		came(n, entry.op_context);
	} else if ((uintptr_t) entry.op_context & 1) {
		way = (struct way *) ((char *) entry.op_context - 1);
		way->sends = 0;
		ended(way->begun[0]);
	} else {
		way = entry.op_context;
		way->writes = 0;
		ended(way->begun[1]);
		wrong += ((volatile uint64_t *) nodes[way - n->ways].slots)[n - nodes] != way->written;
	}
	return 0;
}

/* Talks for so many seconds, or until an operation fails. */
static void go_on(double seconds)
{
	double end = now() + seconds, before = now(), at;

	while ((at = now()) < end && !failed) {
		/* What takes longer is a pause. */
		clock_ += at - before < 0.01 ? at - before : 0.01;
		before = at;
		for (int a = 0; a < count && !failed; a++) {
			for (int b = 0; b < count; b++)
				post(&nodes[a], &nodes[b]);
			failed = progress(&nodes[a]);
		}
	}
	for (int a = 0; a < count; a++) {
		for (int b = 0; b < count; b++) {
			struct way *way = &nodes[a].ways[b];
			if (way->sends)
				ended(way->begun[0]);
			if (way->writes)
				ended(way->begun[1]);
		}
	}
}

static const char *path(const char *name)
{
	static char paths[4][4096];
	static int at;

	at = (at + 1) % 4;
	snprintf(paths[at], sizeof paths[at], "%s/%s", dir, name);
	return paths[at];
}

/* A key file of 32 such bytes, in one step. */
static void put(const char *name, int byte)
{
	FILE *file = fopen(path("tmp.key"), "w");

	must("fopen", file ? 0 : -FI_EIO);
	for (int i = 0; i < 32; i++)
		fputc(byte, file);
	fclose(file);
	must("chmod", chmod(path("tmp.key"), 0600));
	must("rename", rename(path("tmp.key"), path(name)));
}

/* A step of docs/security.md, and the time until the domains have seen it. */
static void step(int n)
{
	if (n == 0) {
		put("next.key", 2);
	} else if (n == 1) {
		unlink(path("old.key"));
		must("link", link(path("job.key"), path("old.key")));
		must("rename", rename(path("next.key"), path("job.key")));
	} else {
		must("unlink", unlink(path("old.key")));
	}
	go_on(1.5);
}

static void check(const char *what)
{
	printf("%s: %ld messages, longest operation %.3f s\n", what, arrived, longest);
	expect("no operation failed", failed, 0);
	expect("no byte is wrong", wrong, 0);
	expect("no operation waited as long as a refused key", longest < 1, 1);
	expect("they talked", arrived > 500, 1);
	longest = arrived = wrong = failed = 0;
}

/* All three steps under load. In each step a node comes and opens a session with each. */
static void files(void)
{
	struct node *late;

	put("job.key", 1);
	for (int i = 0; i < 3; i++)
		join(open_node(0, FILES));
	go_on(0.2);
	for (int n = 0; n < 3; n++) {
		step(n);
		join(open_node(0, FILES));
		go_on(0.2);
	}
	check("files");

	/* The key of a program is the new one, and then the old one. */
	join(open_node(2, 32));
	go_on(0.2);
	check("the new key");
	late = open_node(1, 32);
	reaches(late, &nodes[0], FI_ADDR_UNSPEC);
	go_on(10);
	expect("the old key", failed, FI_EACCES);
	longest = arrived = wrong = failed = 0;
	close_all();
}

/*
 * The key of a tenant of a service changes, and the other tenant sees nothing. A process is reached
 * under the key that its session was opened under: one that was there by the old address.
 */
static void tenants(void)
{
	struct node *host, *one, *two;
	struct ops_av *late;
	unsigned char key[32];
	fi_addr_t keys[3];

	put("job.key", 1);
	host = open_node(0, SIZE_MAX);
	one = open_node(0, FILES);
	two = open_node(3, 32);
	late = (struct ops_av *) host->av->ops;
	for (int i = 0; i < 3; i += 2) {
		memset(key, 1 + i, 32);
		must("insert", late->insert_auth_key(host->av, key, 32, &keys[i], 0));
	}
	reaches(host, one, keys[0]);
	reaches(host, two, keys[2]);
	reaches(one, host, FI_ADDR_UNSPEC);
	reaches(two, host, FI_ADDR_UNSPEC);
	go_on(0.2);
	memset(key, 2, 32);
	must("insert", late->insert_auth_key(host->av, key, 32, &keys[1], 0));
	for (int n = 0; n < 3; n++) {
		step(n);
		one = open_node(0, FILES);
		reaches(host, one, keys[n > 0]);
		reaches(one, host, FI_ADDR_UNSPEC);
		go_on(0.2);
	}
	check("tenants");
	close_all();
}

int main(int argc, char **argv)
{
	char list[3 * 4096];

	must("arguments", argc == 2 ? 0 : -FI_EINVAL);
	dir = argv[1];
	snprintf(list, sizeof list, "%s/job.key:%s/next.key:%s/old.key", dir, dir, dir);
	setenv("FI_BAREWIRE_KEY_FILE", list, 1);
	files();
	tenants();
	printf("ok end\n");
	return bad != 0;
}
