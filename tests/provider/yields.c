/*
 * sched_yield that sleeps, for ranks that are more than the processors and wait by yielding.
 *
 * In Linux 6.18 and 6.19 processes that yield to each other keep all others, kernel threads too,
 * from the processor for up to a minute (sched/fair: "Fix zero_vruntime tracking fix", April 2026):
 * frames stay where they are, and T_dead passes.
 */
#include <time.h>

int sched_yield(void)
{
	/* 20 us; the kernel adds its timer slack, 50 us. */
	struct timespec nap = { 0, 20000 };

	return nanosleep(&nap, 0) && 0;
}
