/*
 * How our programs in C say what they found: one line for each check, "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#ifndef BAREWIRE_CHECK_H
#define BAREWIRE_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

/* Checks that failed. */
static int bad;

static inline void expect(const char *name, long got, long want)
{
	if (got == want) {
		printf("ok %s\n", name);
	} else {
		printf("BAD %s: got %ld (%s), want %ld (%s)\n", name, got, fi_strerror((int) labs(got)),
		       want, fi_strerror((int) labs(want)));
		bad++;
	}
	fflush(stdout);
}

/* Without it nothing else can be checked. */
static inline void must(const char *what, long ret)
{
	if (ret < 0) {
		printf("BAD %s: %ld (%s)\n", what, ret, fi_strerror((int) -ret));
		exit(1);
	}
}

/* What an address vector calls an endpoint that it did not know. */
static inline fi_addr_t known(struct fid_av *av, struct fid_ep *ep)
{
	char name[64];
	size_t len = sizeof name;
	fi_addr_t addr;
	must("fi_getname", fi_getname(&ep->fid, name, &len));
	if (fi_av_insert(av, name, 1, &addr, 0, NULL) != 1)
		must("fi_av_insert", -1);
	return addr;
}

/* Seconds. */
static inline double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#endif
