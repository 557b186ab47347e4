/*
 * What fi_getinfo says of the device under the port that is set, one fact a line, as "FACT VALUE".
 * What is NULL or 0 has no value. A copy by fi_dupinfo says the same, which is checked here.
 */
#include <string.h>

#include "check.h"

static void text(FILE *to, const char *what, const char *value)
{
	fprintf(to, "%s %s\n", what, value ? value : "");
}

static void tell(FILE *to, const struct fid_nic *nic)
{
	const struct fi_pci_attr *pci = &nic->bus_attr->attr.pci;

	text(to, "name", nic->device_attr->name);
	text(to, "vendor", nic->device_attr->vendor_id);
	text(to, "device", nic->device_attr->device_id);
	text(to, "version", nic->device_attr->device_version);
	text(to, "driver", nic->device_attr->driver);
	text(to, "firmware", nic->device_attr->firmware);
	if (nic->bus_attr->bus_type == FI_BUS_PCI)
		fprintf(to, "pci %04x:%02x:%02x.%x\n", pci->domain_id, pci->bus_id, pci->device_id,
			pci->function_id);
	else
		fprintf(to, "pci \nbytes %d\n", pci->domain_id | pci->bus_id | pci->device_id);
	text(to, "address", nic->link_attr->address);
	fprintf(to, "mtu %zu\nspeed %zu\n", nic->link_attr->mtu, nic->link_attr->speed);
	fprintf(to, "state %d\n", nic->link_attr->state);
	text(to, "network", nic->link_attr->network_type);
}

static char *told(const struct fid_nic *nic)
{
	char *said;
	size_t len;
	FILE *to = open_memstream(&said, &len);

	tell(to, nic);
	fclose(to);
	return said;
}

int main(void)
{
	struct fi_info *list, *copy;
	char *said, *again;

	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &list));
	for (const struct fi_info *one = list; one; one = one->next)
		expect("every answer has a device", one->nic != NULL, 1);
	said = told(list->nic);
	copy = fi_dupinfo(list);
	expect("a copy has a device of its own", copy && copy->nic && copy->nic != list->nic, 1);
	fi_freeinfo(list);
	again = told(copy->nic);
	expect("a copy says the same", strcmp(said, again), 0);
	fi_freeinfo(copy);
	fputs(again, stdout);
	printf("ok end\n");
	free(said);
	free(again);
	return bad != 0;
}
