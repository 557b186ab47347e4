#include <rte_errno.h>
#include <rte_lcore.h>
#include "shim.h"

int barewire_rte_errno(void)
{
	return rte_errno;
}

unsigned int barewire_rte_lcore_id(void)
{
	return rte_lcore_id();
}
