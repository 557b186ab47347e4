/*
 * answers CASE safe|domain [GROUP]: a program with manual progress whose receive thread answers for it on
 * a wire, in lives that are hard on a thread. A peer, another process, sends to it all the time, and
 * says at the end whether it was always answered.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/fi_tagged.h>

struct end {
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t other;
};

/* What the peer says at the end. */
struct verdict {
	long sent;
	/* 0, or the error of the first message that failed. */
	long error;
	/* Seconds that a message took at most. */
	double longest;
};

static struct end here;
static struct fi_info *info;
static int to_peer;
static long in[256];
static unsigned seed;

/* T_dead of both processes. */
static double t_dead(void)
{
	const char *ms = getenv("FI_BAREWIRE_T_DEAD_MS");
	return ms ? atof(ms) / 1e3 : 5;
}

static struct fi_info *ask(const char *threading)
{
	struct fi_info *hints = fi_allocinfo(), *found = NULL;
	hints->caps = FI_TAGGED;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->threading =
		strcmp(threading, "domain") ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->fabric_attr->prov_name = strdup("barewire");
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &found));
	fi_freeinfo(hints);
	return found;
}

static void open_end(struct end *e)
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

/* Each tells the other its address. */
static void meet(struct end *e, int fd)
{
	char mine[64] = { 0 }, theirs[64];
	size_t len = sizeof mine;
	must("fi_getname", fi_getname(&e->ep->fid, mine, &len));
	if (write(fd, mine, sizeof mine) != sizeof mine || read(fd, theirs, sizeof theirs) != 64)
		must("addresses", -1);
	must("fi_av_insert", fi_av_insert(e->av, theirs, 1, &e->other, 0, NULL) - 1);
}

/* Sends one message after the other from 'g' to 's', and says what came of it at 'q'. */
static void peer(int fd)
{
	struct verdict all = { 0 };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	double begun = 0;
	int sending = 0, on_its_way = 0;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	open_end(&here);
	meet(&here, fd);
	for (;;) {
		struct pollfd ready = { .fd = fd, .events = POLLIN };
		char what = 0;
		if (poll(&ready, 1, sending || on_its_way ? 0 : 200) == 1 && read(fd, &what, 1) != 1)
			exit(0);
		sending = what == 'g' || (sending && what != 's' && what != 'q');
		if (what == 'q') {
			if (write(fd, &all, sizeof all) != sizeof all)
				exit(1);
			continue;
		}
		if (sending && !on_its_way && !all.error) {
			ssize_t ret = fi_tsend(here.ep, &all.sent, 8, NULL, here.other, 1, NULL);
			on_its_way = ret == 0;
			if (ret && ret != -FI_EAGAIN)
				all.error = -ret;
			begun = now();
		}
		ssize_t n = fi_cq_read(here.cq, &entry, 1);
		if (n == -FI_EAVAIL) {
			fi_cq_readerr(here.cq, &error, 0);
			all.error = error.err;
			on_its_way = 0;
		} else if (n == 1 || (on_its_way && now() - begun > all.longest)) {
			all.longest = now() - begun > all.longest ? now() - begun : all.longest;
			all.sent += n == 1;
			on_its_way = n != 1;
		}
		usleep(200);
	}
}

static void start_peer(const char *threading)
{
	int fds[2];
	must("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, fds));
	fflush(stdout);
	pid_t pid = fork();
	must("fork", pid);
	if (pid == 0) {
		close(fds[0]);
		info = ask(threading);
		peer(fds[1]);
	}
	close(fds[1]);
	to_peer = fds[0];
}

static void tell(char what)
{
	if (write(to_peer, &what, 1) != 1)
		must("the peer", -1);
}

/* Without a call of libfabric. */
static void compute(double seconds)
{
	double start = now();
	volatile double x = 1;
	while (now() - start < seconds)
		for (int i = 0; i < 1000; i++)
			x = x * 1.0000001 + 1e-9;
}

static void post(long slot)
{
	ssize_t ret;
	while ((ret = fi_trecv(here.ep, &in[slot], 8, NULL, FI_ADDR_UNSPEC, 1, 0,
			       (void *) slot)) == -FI_EAGAIN)
		fi_cq_read(here.cq, NULL, 0);
	must("fi_trecv", ret);
}

/* Takes messages for so long, in the order that they were sent in. Returns how many. */
static long take(double seconds)
{
	static long next;
	struct fi_cq_tagged_entry entry;
	double start = now();
	long taken = 0;
	while (now() - start < seconds) {
		ssize_t n = fi_cq_read(here.cq, &entry, 1);
		if (n == -FI_EAGAIN)
			continue;
		must("fi_cq_read", n);
		long slot = (long) entry.op_context;
		if (in[slot] != next++)
			must("the order of messages", -1);
		post(slot);
		taken++;
	}
	return taken;
}

static void begin(const char *threading)
{
	info = ask(threading);
	open_end(&here);
	meet(&here, to_peer);
	for (long slot = 0; slot < 256; slot++)
		post(slot);
	tell('g');
	take(0.1);
}

/* The peer got an answer to each message, and the program gets all of them. */
static void end(double bound)
{
	struct verdict all;
	tell('s');
	take(0.1);
	tell('q');
	if (read(to_peer, &all, sizeof all) != sizeof all)
		must("the peer's verdict", -1);
	printf("sent %ld, longest %.0f ms\n", all.sent, all.longest * 1e3);
	expect("no message failed", all.error, 0);
	expect("messages were sent", all.sent > 0, 1);
	expect("each was answered in time", all.longest < bound, 1);
	must("close", fi_close(&here.ep->fid));
	must("close", fi_close(&here.cq->fid));
	must("close", fi_close(&here.av->fid));
	must("close", fi_close(&here.domain->fid));
	must("close", fi_close(&here.fabric->fid));
}

/* A number of the receive thread, 0 if there is none. */
static int receive_thread(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;
	int found = 0;
	while ((task = readdir(tasks))) {
		char path[300], name[32] = "";
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
		FILE *file = fopen(path, "r");
		if (file && fgets(name, sizeof name, file) && !strcmp(name, "barewire-rcv\n"))
			found = atoi(task->d_name);
		if (file)
			fclose(file);
	}
	closedir(tasks);
	return found;
}

/* The number behind `name` in the status of a thread. */
static unsigned long status_of(int thread, const char *name, int base)
{
	char path[64], line[256];
	unsigned long value = 0;
	snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
	FILE *file = fopen(path, "r");
	while (file && fgets(line, sizeof line, file))
		if (!strncmp(line, name, strlen(name)))
			value = strtoul(line + strlen(name) + 1, NULL, base);
	if (file)
		fclose(file);
	return value;
}

/* Nanoseconds that a thread has run. */
static unsigned long ran_ns(int thread)
{
	char path[64];
	unsigned long ns = 0;
	snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", thread);
	FILE *file = fopen(path, "r");
	if (!file || fscanf(file, "%lu", &ns) != 1)
		must("schedstat", -1);
	fclose(file);
	return ns;
}

/* Children that call, close, end or become another program, while the thread works. */
static void forks(void)
{
	int wrong = 0;
	for (int i = 0; i < 30; i++) {
		int status = -1;
		compute((rand_r(&seed) % 30) / 1e3);
		pid_t child = fork();
		must("fork", child);
		if (child == 0) {
			struct fi_cq_tagged_entry entry;
			/* Kills a child that hangs. */
			alarm(20);
			if (i % 3 == 2) {
				execlp("true", "true", (char *) NULL);
				_exit(9);
			}
			if (fi_tsend(here.ep, in, 8, NULL, here.other, 1, NULL) != -FI_EOPBADSTATE)
				_exit(2);
			if (fi_cq_read(here.cq, &entry, 1) != -FI_EOPBADSTATE)
				_exit(3);
			if (i % 3 == 1) {
				fi_close(&here.ep->fid);
				fi_close(&here.cq->fid);
				fi_close(&here.av->fid);
				fi_close(&here.domain->fid);
			}
			exit(0);
		}
		if (i % 2)
			take(0.02);
		waitpid(child, &status, 0);
		if (status)
			printf("child %d: status %x\n", i, status);
		wrong += status != 0;
	}
	expect("children end and are refused", wrong, 0);
	compute(3 * t_dead());
	expect("the parent goes on", take(0.1) > 0, 1);
}

static volatile sig_atomic_t on_others, may_jump, jumps;
static pid_t main_thread;
static sigjmp_buf back;

static void note(int sig)
{
	(void) sig;
	if (syscall(SYS_gettid) != main_thread)
		on_others++;
	if (may_jump) {
		may_jump = 0;
		jumps++;
		siglongjmp(back, 1);
	}
}

/* Signals are the program's: none comes to the thread. A handler may jump out of what the program
 * computes. */
static void signals(void)
{
	struct itimerval soon = { .it_value = { 0, 5000 } };
	unsigned long mask = status_of(receive_thread(), "SigBlk:", 16), open = 0;
	sigset_t one;
	for (int sig = 1; sig < 64; sig++)
		if (sig != SIGKILL && sig != SIGSTOP && sig != 32 && sig != 33)
			open += !(mask >> (sig - 1) & 1);
	expect("no signal is open in the thread", open, 0);
	main_thread = getpid();
	signal(SIGUSR1, note);
	signal(SIGALRM, note);
	sigemptyset(&one);
	sigaddset(&one, SIGUSR1);
	for (int i = 0; i < 50; i++) {
		/* While the program's thread takes none, it would come to another. */
		sigprocmask(SIG_BLOCK, &one, NULL);
		kill(getpid(), SIGUSR1);
		compute(0.002);
		sigprocmask(SIG_UNBLOCK, &one, NULL);
	}
	for (int i = 0; i < 100; i++) {
		if (!sigsetjmp(back, 1)) {
			may_jump = 1;
			setitimer(ITIMER_REAL, &soon, NULL);
			compute(20);
		}
		if (i % 4 == 0)
			take(0.01);
	}
	expect("signals on other threads", on_others, 0);
	expect("jumps out of computing", jumps, 100);
}

/* The creator has a real-time policy and one processor, and computes there. */
static int be_greedy(void)
{
	struct sched_param high = { .sched_priority = 10 };
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	must("sched_setaffinity", sched_setaffinity(0, sizeof one, &one));
	return sched_setscheduler(0, SCHED_FIFO, &high);
}

/* From now on the kernel refuses `call` with `code`; clone3 seems not to be there. */
static void refuse(int call, int code)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | code),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
	must("no_new_privs", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must("seccomp", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

/* No process of nobody's beside this one. What has to be read as root was. */
static void take_threads_away(void)
{
	struct rlimit one = { 1, 1 };
	fi_freeinfo(ask("safe"));
	if (getuid() == 0)
		must("setuid", setresuid(65534, 65534, 65534));
	must("setrlimit", setrlimit(RLIMIT_NPROC, &one));
}

/*
 * The domain works for who polls, without its thread. Who takes the lock needs no barrier for it,
 * and without the barrier every domain takes it.
 */
static void alone(const char *threading, const char *refused)
{
	int needs = !!strcmp(refused, "membarrier");
	begin(threading);
	expect("no thread", receive_thread() == 0, needs);
	expect("messages come", take(0.3) > 0, 1);
}

/*
 * What the thread does in so many seconds of `program`. A virtual processor counts as used what its
 * host takes from it, so the least share of up to three tries counts.
 */
static void cost(const char *when, void (*program)(double), double seconds, double most)
{
	int thread = receive_thread();
	double share = 1;
	for (int tries = 0; tries < 3 && share > 0.001; tries++) {
		unsigned long woken = status_of(thread, "voluntary_ctxt_switches:", 10), ns = ran_ns(thread);
		program(seconds);
		woken = status_of(thread, "voluntary_ctxt_switches:", 10) - woken;
		ns = ran_ns(thread) - ns;
		share = ns / seconds / 1e9;
		printf("cost %s: %lu wake-ups in %.0f s, %.1f us of the processor each, share %.5f %%\n",
		       when, woken, seconds, woken ? ns / 1e3 / woken : 0.0, share * 100);
		expect(when, woken <= most * seconds + (most > 0), 1);
	}
	expect("share of a processor", share <= 0.001, 1);
}

static void poll_for(double seconds)
{
	take(seconds);
}

static void costs(const char *threading)
{
	info = ask(threading);
	open_end(&here);
	compute(2 * t_dead() / 10 + 0.1);
	cost("computes, no peers", compute, 2, 0);
	meet(&here, to_peer);
	for (long slot = 0; slot < 256; slot++)
		post(slot);
	tell('g');
	expect("messages come", take(0.3) > 0, 1);
	tell('s');
	take(0.5);
	compute(1);
	cost("computes, a silent peer", compute, 5, 2);
	take(2);
	cost("polls, a silent peer", poll_for, 2, 11);
}

/* Ends when the main function does. */
static void slowly(void)
{
	usleep(50000);
}

int main(int argc, char **argv)
{
	const char *which = argc > 1 ? argv[1] : "", *threading = argc > 2 ? argv[2] : "safe";
	double bound = t_dead();
	seed = (unsigned) getpid();
	printf("seed %u\n", seed);
	start_peer(threading);
	if (!strcmp(which, "fork")) {
		begin(threading);
		forks();
	} else if (!strcmp(which, "exit")) {
		begin(threading);
		atexit(slowly);
		compute(0.05 + rand_r(&seed) % 50 / 1e3);
		printf("ok end\n");
		exit(0);
	} else if (!strcmp(which, "signals")) {
		begin(threading);
		signals();
		compute(3 * t_dead());
	} else if (!strcmp(which, "quota")) {
		FILE *group = fopen(argv[3], "w");
		if (!group || fprintf(group, "%d\n", getpid()) < 0 || fclose(group))
			must("the group", -errno);
		begin(threading);
		compute(3 * t_dead());
	} else if (!strcmp(which, "fifo")) {
		if (be_greedy()) {
			printf("lacking: a real-time policy: %s\n", strerror(errno));
			return 0;
		}
		begin(threading);
		compute(3 * t_dead());
	} else if (!strncmp(which, "refuse-", 7)) {
		if (!strcmp(which + 7, "clone"))
			refuse(SYS_clone, EAGAIN);
		else if (!strcmp(which + 7, "membarrier"))
			refuse(SYS_membarrier, EPERM);
		else if (!strcmp(which + 7, "nproc"))
			take_threads_away();
		alone(threading, which + 7);
	} else if (!strcmp(which, "cost")) {
		costs(threading);
		bound = 60;
	} else {
		return 2;
	}
	end(bound);
	if (!bad)
		printf("ok end\n");
	return bad != 0;
}
