# The components that `cmake --install` installs: server, cli, and client (the C++ library for
# find_package(Tessera)).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Only the server uses the library of kernels, so this library is in a private folder.
set(TESSERA_PRIVATE_LIBDIR ${CMAKE_INSTALL_LIBDIR}/tessera)
file(RELATIVE_PATH private_libdir_from_bin /${CMAKE_INSTALL_BINDIR} /${TESSERA_PRIVATE_LIBDIR})
set_target_properties(tessera-server PROPERTIES INSTALL_RPATH "$ORIGIN/${private_libdir_from_bin}")
install(TARGETS tessera-server RUNTIME COMPONENT server)
install(TARGETS tessera_kernels LIBRARY DESTINATION ${TESSERA_PRIVATE_LIBDIR} COMPONENT server)
install(TARGETS tessera RUNTIME COMPONENT cli)

# --- the client library -----------------------------------------------------------------------------------------------

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
set(TESSERA_HEADER_DIR ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
foreach(part proto base client)
  set_target_properties(tessera_${part} PROPERTIES EXPORT_NAME ${part})
endforeach()
install(TARGETS tessera_proto tessera_base tessera_client EXPORT TesseraTargets
  ARCHIVE COMPONENT client
  INCLUDES DESTINATION ${TESSERA_HEADER_DIR})
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT client)
# The public headers, and the headers that they include.
install(FILES client/arrays.h client/async.h client/client.h client/expression.h client/expression_text.h client/npy.h
              client/operations.h client/program_results.h client/random_array.h client/resident_buffer.h client/ring_client.h
              client/shared_memory.h client/slice.h
  DESTINATION ${TESSERA_HEADER_DIR}/client COMPONENT client)
install(FILES kernels/base/dtype.h kernels/base/element.h kernels/base/error.h kernels/base/launch.h kernels/base/map_op.h
              kernels/base/linalg_function.h kernels/base/reduce_op.h kernels/base/take_mode.h
  DESTINATION ${TESSERA_HEADER_DIR}/kernels/base COMPONENT client)
install(FILES kernels/client_and_server/operations.h kernels/client_and_server/printable.h kernels/client_and_server/ring.h
  DESTINATION ${TESSERA_HEADER_DIR}/kernels/client_and_server COMPONENT client)
install(DIRECTORY ${TESSERA_PROTO_DIR}/tessera ${PROJECT_SOURCE_DIR}/proto/tessera
  DESTINATION ${TESSERA_HEADER_DIR} COMPONENT client FILES_MATCHING PATTERN "*.pb.h" PATTERN "*.proto")

configure_package_config_file(deploy/TesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
  INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TesseraConfig.cmake ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT client)

# --- manual pages and completion --------------------------------------------------------------------------------------

# The pages are generated from the help texts of the programs. Only packages need them, so "all"
# does not include them.
set(TESSERA_MANUAL_DIR ${PROJECT_BINARY_DIR}/manual)
add_custom_target(manual
  COMMAND /usr/bin/python3 ${PROJECT_SOURCE_DIR}/deploy/tools/manual.py --out ${TESSERA_MANUAL_DIR}
          $<TARGET_FILE:tessera>:1 $<TARGET_FILE:tessera-server>:8
  COMMAND ${CMAKE_COMMAND} -E make_directory ${TESSERA_MANUAL_DIR}/completion
  COMMAND tessera completion bash > ${TESSERA_MANUAL_DIR}/completion/tessera
  COMMAND tessera completion zsh > ${TESSERA_MANUAL_DIR}/completion/_tessera
  COMMAND tessera completion fish > ${TESSERA_MANUAL_DIR}/completion/tessera.fish
  VERBATIM)
install(DIRECTORY ${TESSERA_MANUAL_DIR}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT cli OPTIONAL)
install(DIRECTORY ${TESSERA_MANUAL_DIR}/man8 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT server OPTIONAL)
install(FILES ${TESSERA_MANUAL_DIR}/completion/tessera DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
  COMPONENT cli OPTIONAL)
install(FILES ${TESSERA_MANUAL_DIR}/completion/_tessera DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions
  COMPONENT cli OPTIONAL)
install(FILES ${TESSERA_MANUAL_DIR}/completion/tessera.fish
  DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT cli OPTIONAL)
