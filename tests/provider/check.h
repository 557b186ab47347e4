/*
 * How our programs in C say what they found: one line for each check, "ok NAME" or
 * "BAD NAME: got X, want Y".
 */
#ifndef BAREWIRE_CHECK_H
#define BAREWIRE_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

/* Seconds. */
static inline double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

#endif
